#include "weft/optim/elementwise.h"

#include <torch/serialize/archive.h>

#include <cmath>

#include "weft/core/error.h"
#include "weft/memory/account.h"
#include "weft/optim/offload.h"
#include "weft/parallel/shard_owner.h"

namespace weft::optim {
namespace {

/// `parameter`, or for one on a device a copy of it and of its gradient.
at::Tensor in_host_memory(const at::Tensor& parameter) {
  if (parameter.is_cpu() || parameter.is_meta()) return parameter;
  at::Tensor here = parameter.detach().to(at::kCPU);
  here.mutable_grad() = parameter.grad().to(at::kCPU);
  return here;
}

}  // namespace

void require_as_kept(const at::Tensor& state, const StateSpec& spec, int64_t elements) {
  if (state.scalar_type() == spec.dtype && state.numel() == spec.numel(elements)) return;
  throw ConfigError("a loaded optimizer state '" + spec.name + "' has " + std::to_string(state.numel()) + " numbers of type " +
                    c10::toString(state.scalar_type()) + "; this optimizer keeps " + std::to_string(spec.numel(elements)) + " of type " +
                    c10::toString(spec.dtype) + ". Load it into an optimizer with the options, and on the shards, that it was saved with");
}

void NamedState::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("step", c10::IValue(step));
  for (const auto& [name, tensor] : elsewhere ? elsewhere() : tensors) archive.write(name, c10::IValue(tensor));
}

void NamedState::serialize(torch::serialize::InputArchive& archive) {
  const memory::Scope scope(memory::Category::optimizer);
  step = 1;  // torch::optim::SGD counts none
  for (const std::string& name : archive.keys()) {
    c10::IValue value;
    archive.read(name, value);
    if (name == "step") {
      step = value.toInt();
    } else if (value.isTensor()) {
      tensors[name] = value.toTensor();
    }
  }
}

Kept::Kept(const at::Tensor& parameter, NamedState& state, const std::vector<StateSpec>& specs)
    : Kept(parameter, state, specs, is_16_bit(parameter.scalar_type())) {}

Kept::Kept(const at::Tensor& parameter, NamedState& state, const std::vector<StateSpec>& specs, bool master)
    : weight(parameter.detach().view(-1)), grad(parameter.grad().contiguous().view(-1)) {
  const int64_t n = weight.numel();
  if (master) {
    copy = weight;
    at::Tensor& wide = state.tensors[kMaster];
    if (!wide.defined()) wide = copy.to(at::kFloat);
    require_as_kept(wide, {.name = kMaster, .dtype = at::kFloat}, n);
    weight = wide;
  }
  for (const StateSpec& spec : specs) {
    at::Tensor& tensor = state.tensors[spec.name];
    if (!tensor.defined()) tensor = at::zeros({spec.numel(n)}, weight.options().dtype(spec.dtype));
    require_as_kept(tensor, spec, n);
    states.push_back(tensor.view(-1));
  }
}

bool is_16_bit(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }
at::ScalarType wide_dtype(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

at::Tensor evaluate(const torch::optim::Optimizer::LossClosure& closure) {
  if (closure == nullptr) return {};
  const at::AutoGradMode enable_grad(true);
  return closure();
}

void require_dense(const at::Tensor& parameter, const at::Tensor& grad) {
  const bool here = parameter.is_cpu() || parameter.is_meta();
  if (here && parameter.is_contiguous() && grad.layout() == at::kStrided && !parameter.is_complex()) return;
  throw ConfigError("a parameter of shape " + c10::str(parameter.sizes()) + " on " + parameter.device().str() +
                    " is not contiguous, is sparse, complex, or not in the CPU's memory; weft's optimizers update dense real parameters "
                    "there. Use a torch::optim optimizer for it");
}

void notify_updated(const std::vector<OptimizerParamGroup>& groups) {
  for (const auto& group : groups) {
    for (const at::Tensor& p : group.params()) parallel::notify_updated(p);
  }
}

void keep_options(std::vector<OptimizerParamGroup>& held, const std::vector<OptimizerParamGroup>& given) {
  for (size_t i = 0; i < given.size(); ++i) {
    if (given[i].has_options()) held[i].set_options(given[i].options().clone());
  }
}

void check_range(const char* option, double value, double low, double below) {
  if (value >= low && value < below) return;
  const std::string limit = std::isinf(below) ? "finite" : "below " + std::to_string(below);
  throw ConfigError(std::string("optimizer option ") + option + " is " + std::to_string(value) + "; it must be at least " +
                    std::to_string(low) + " and " + limit);
}

std::vector<StateSpec> ElementwiseOptimizer::state_specs(const at::Tensor& parameter, const OptimizerOptions& options) const {
  std::vector<StateSpec> specs = own_states(parameter, options);
  if (keeps_master(parameter)) specs.insert(specs.begin(), {.name = kMaster, .dtype = at::kFloat});
  return specs;
}

at::Tensor ElementwiseOptimizer::step(LossClosure closure) {
  const at::Tensor loss = evaluate(closure);
  const at::NoGradGuard no_grad;
  const memory::Scope scope(memory::Category::optimizer);
  if (in_file_) in_file_->update(*this, param_groups_, state_);
  for (auto& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      if (!in_file_ && parameter.grad().defined()) update_parameter(parameter, group.options());
    }
  }
  notify_updated(param_groups_);
  return loss;
}

void ElementwiseOptimizer::offload(const OffloadOptions& options, const memory::FileCalls& calls) {
  if (offloaded_to_ || !state_.empty()) {
    throw ConfigError("offload() of an optimizer that has state, or is offloaded already: state is not moved. Call it once, before the "
                      "first step and before load()");
  }
  if (options.to == OffloadOptions::To::nvme) in_file_ = std::make_shared<OffloadedStates>(*this, param_groups_, options, calls);
  offloaded_to_ = options.to;
}

std::optional<OffloadUse> ElementwiseOptimizer::offload_use() const {
  return in_file_ ? std::optional(in_file_->use()) : std::nullopt;
}

void ElementwiseOptimizer::loaded() {
  const at::NoGradGuard no_grad;
  if (in_file_) in_file_->take(state_);
}

void ElementwiseOptimizer::update_parameter(const at::Tensor& parameter, const OptimizerOptions& options) {
  const at::Tensor here = offloaded_to_ ? in_host_memory(parameter) : parameter;
  require_dense(here, here.grad());
  auto& slot = state_[parameter.unsafeGetTensorImpl()];
  if (!slot) slot = std::make_unique<NamedState>();
  auto& state = static_cast<NamedState&>(*slot);
  ++state.step;
  const Kept kept(here, state, own_states(parameter, options), keeps_master(parameter));
  update({.weight = kept.weight,
          .grad = kept.grad,
          .copy = kept.copy,
          .states = kept.states,
          .step = state.step,
          .begin = 0,
          .parameter = parameter.unsafeGetTensorImpl()},
         options);
  if (!here.is_same(parameter)) parameter.detach().copy_(here);
}

}  // namespace weft::optim
