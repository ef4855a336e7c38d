#include "weft/optim/offload.h"

#include <ATen/ATen.h>

#include <chrono>

#include "weft/core/error.h"

namespace weft::optim {
namespace {

using Clock = std::chrono::steady_clock;

bool equal(const std::vector<StateSpec>& a, const std::vector<StateSpec>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const StateSpec& x, const StateSpec& y) {
    return x.name == y.name && x.dtype == y.dtype && x.per == y.per;
  });
}

[[noreturn]] void throw_changed(const std::string& what) {
  throw ConfigError(what + " after offload(), for which the file was laid out. Call offload() last, before the first step and before load()");
}

}  // namespace

OffloadedStates::OffloadedStates(const ElementwiseOptimizer& optimizer, const std::vector<OptimizerParamGroup>& groups,
                                 const OffloadOptions& options, const memory::FileCalls& calls) {
  std::vector<StateFile::Owner> owners;
  bool meta = false;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const at::Tensor& p : groups[g].params()) {
      entries_.push_back({p, optimizer.state_specs(p, groups[g].options()), g});
      StateFile::Owner owner{.numel = p.numel(), .tensors = {}, .granule = optimizer.granule(p)};
      for (const StateSpec& spec : entries_.back().specs) {
        owner.tensors.push_back({spec.dtype, spec.per});
        touched_ += 2 * spec.numel(p.numel()) * static_cast<int64_t>(c10::elementSize(spec.dtype));
      }
      touched_ += 3 * static_cast<int64_t>(p.nbytes());
      owners.push_back(std::move(owner));
      meta = meta || p.is_meta();
    }
  }
  file_ = std::make_shared<StateFile>(std::move(owners), StateFileOptions{.dir = options.dir, .buffer_bytes = options.buffer_bytes,
                                                                          .buffers = options.buffers, .what = options.what},
                                      meta, calls);
}

void OffloadedStates::check_unchanged(const ElementwiseOptimizer& optimizer, const std::vector<OptimizerParamGroup>& groups) const {
  size_t o = 0;
  for (const auto& group : groups) {
    for (const at::Tensor& p : group.params()) {
      if (o == entries_.size() || !entries_[o].parameter.is_same(p)) throw_changed("a parameter was added to the optimizer");
      if (!equal(entries_[o].specs, optimizer.state_specs(p, group.options()))) throw_changed("what the optimizer keeps of a parameter has changed");
      ++o;
    }
  }
}

NamedState& OffloadedStates::state_of(size_t owner, States& states) {
  auto& slot = states[entries_[owner].parameter.unsafeGetTensorImpl()];
  if (!slot) slot = std::make_unique<NamedState>();
  auto& state = static_cast<NamedState&>(*slot);
  if (!state.elsewhere) state.elsewhere = [this, owner] { return pages(owner); };
  return state;
}

std::map<std::string, at::Tensor> OffloadedStates::pages(size_t owner) {
  std::map<std::string, at::Tensor> tensors;
  const std::vector<at::Tensor> pages = file_->pages(owner);
  for (size_t t = 0; t < pages.size(); ++t) tensors.emplace(entries_[owner].specs[t].name, pages[t]);
  return tensors;
}

void OffloadedStates::update(const ElementwiseOptimizer& optimizer, const std::vector<OptimizerParamGroup>& groups, States& states) {
  const auto start = Clock::now();
  check_unchanged(optimizer, groups);
  take(states);
  std::vector<bool> active(entries_.size());
  std::vector<at::Tensor> grads(entries_.size());
  for (size_t o = 0; o < entries_.size(); ++o) {
    const at::Tensor& parameter = entries_[o].parameter;
    active[o] = parameter.grad().defined();
    if (!active[o]) continue;
    require_dense(parameter, parameter.grad());
    grads[o] = parameter.grad().contiguous().view(-1);
    ++state_of(o, states).step;
  }
  const auto update_piece = [&](const StateFile::Piece& piece) {
    const Entry& entry = entries_[piece.owner];
    const at::Tensor weight = entry.parameter.detach().view(-1).narrow(0, piece.begin, piece.n);
    Stretch stretch{.weight = weight,
                    .grad = grads[piece.owner].narrow(0, piece.begin, piece.n),
                    .copy = {},
                    .states = {},
                    .step = state_of(piece.owner, states).step,
                    .begin = piece.begin,
                    .parameter = entry.parameter.unsafeGetTensorImpl()};
    for (size_t t = 0; t < entry.specs.size(); ++t) {
      if (entry.specs[t].name != kMaster) {
        stretch.states.push_back(piece.state[t]);
        continue;
      }
      if (piece.fresh) piece.state[t].copy_(weight);
      stretch.weight = piece.state[t];
      stretch.copy = weight;
    }
    optimizer.update(stretch, groups[entry.group].options());
  };
  file_->for_each(active, update_piece);
  // What has no state has no pieces in the file either.
  for (size_t o = 0; o < entries_.size(); ++o) {
    if (active[o] && entries_[o].specs.empty()) update_piece({.owner = o, .begin = 0, .n = entries_[o].parameter.numel(), .state = {}, .fresh = false});
  }
  ++steps_;
  step_s_ += std::chrono::duration<double>(Clock::now() - start).count();
}

void OffloadedStates::take(States& states) {
  for (size_t o = 0; o < entries_.size(); ++o) {
    const auto found = states.find(entries_[o].parameter.unsafeGetTensorImpl());
    if (found == states.end()) continue;
    NamedState& state = state_of(o, states);
    if (state.tensors.empty()) continue;
    std::vector<at::Tensor> tensors;
    for (const StateSpec& spec : entries_[o].specs) {
      at::Tensor& tensor = state.tensors[spec.name];
      // A state that was saved without a master, of fp32 weights say, starts one from the weight.
      if (!tensor.defined() && spec.name == kMaster) tensor = entries_[o].parameter.detach().view(-1).to(spec.dtype);
      if (!tensor.defined()) tensor = at::zeros({spec.numel(entries_[o].parameter.numel())}, at::TensorOptions(spec.dtype));
      require_as_kept(tensor, spec, entries_[o].parameter.numel());
      tensors.push_back(tensor);
    }
    file_->store(o, tensors);
    state.tensors.clear();
  }
}

OffloadUse OffloadedStates::use() const {
  return {.steps = steps_,
          .file_bytes = file_->file_bytes(),
          .buffer_bytes = file_->buffer_bytes(),
          .touched_bytes = touched_,
          .step_s = step_s_,
          .disk = file_->use(),
          .rates = file_->rates()};
}

}  // namespace weft::optim
