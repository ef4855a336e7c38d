#include "weft/parallel/flat_group.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "weft/core/error.h"
#include "weft/layout/place.h"
#include "weft/memory/account.h"
#include "weft/parallel/agreement.h"
#include "weft/parallel/bucket.h"
#include "weft/parallel/flat_view.h"
#include "weft/parallel/storage_state.h"

namespace weft::parallel {

FlatGroup::FlatGroup(Plan plan, const std::vector<NamedTensor>& parameters, const DataAxes& axes)
    : plan_(std::move(plan)), comm_(axes.gathers), reductions_(axes.shard), replicas_(axes.replicas) {
  if (plan_.near > 0) near_ = axes.near.at(plan_.near);
  const at::NoGradGuard no_grad;
  const memory::Scope scope(memory::Category::parameters);
  std::vector<int64_t> numels;
  for (const NamedTensor& p : parameters) numels.push_back(real_numel(p.tensor));
  const layout::FlatPlan place = layout::place(numels, comm_.size(), plan_.granule);
  numel_ = place.numel;
  shard_numel_ = numel_ / comm_.size();
  const at::Tensor& first = parameters.front().tensor;
  const bool deferred = nn::start_values(first) != nullptr;
  auto options = first.options().requires_grad(false).dtype(c10::toRealValueType(first.scalar_type()));
  if (deferred) options = options.device(at::kCPU);
  const bool whole = plan_.residence == Residence::whole;
  const bool away = plan_.on_host && !whole && !first.is_meta();  // a rehearsal's host is the meta device, too
  memory_ = comm_.allocate({whole ? numel_ : shard_numel_}, away ? options.device(at::kCPU) : options);
  full_ = whole ? alias_of(memory_, 0, numel_, memory_.scalar_type()) : at::empty({numel_}, options);
  if (!deferred) full_.zero_();
  std::vector<std::shared_ptr<const nn::StartValues>> rules;
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor parameter = parameters[i].tensor;
    const at::Tensor place_of = part_of(full_, place.offsets[i], parameter);
    if (deferred) {
      rules.push_back(nn::start_values(parameter));
      nn::move_to_memory(parameter, place_of);
    } else {
      place_of.copy_(parameter);
      parameter.set_data(place_of);
    }
    slots_.push_back({.name = parameters[i].name, .parameter = parameter, .shard = {}, .shard_grad = {}, .offset = place.offsets[i]});
  }
  shard_ = whole ? alias_of(memory_, comm_.rank() * shard_numel_ * memory_.element_size(), shard_numel_, memory_.scalar_type()) : memory_;
  message_ = whole ? fmt::format("the parameters of {} ('{}' and {} more) are out of date: after backward each rank updates its own "
                                 "part of them. After a step of an optimizer that is not Weft's call refresh() on the DataParallel, or "
                                 "continue_accumulation() when there was no step",
                                 plan_.label, slots_.front().name, slots_.size() - 1)
                   : fmt::format("the parameters of {} ('{}' and {} more) are sharded: outside of its forward and backward each rank "
                                 "holds its own part only. Read or write them inside DataParallel::gather_full(), and give the "
                                 "optimizer DataParallel::shards()",
                                 plan_.label, slots_.front().name, slots_.size() - 1);
  deferred ? start_from_rules(rules) : start_from_first(axes.all);
  make_shard_views();
}

void FlatGroup::start_from_first(const Comm& all) {
  all.broadcast(full_, 0).released();
  if (plan_.residence == Residence::released) shard_.copy_(own_part(full_));
}

void FlatGroup::start_from_rules(const std::vector<std::shared_ptr<const nn::StartValues>>& rules) {
  if (plan_.residence == Residence::released) release();
  shard_.zero_();
  for (size_t i = 0; i < slots_.size(); ++i) {
    const OwnPart part = own_part_of(slots_[i]);
    if (part.like.numel() == 0) continue;
    const int64_t unit = part.like.is_complex() ? 2 : 1;
    rules[i]->write((part.from - slots_[i].offset) / unit, part_of(shard_, part.from - comm_.rank() * shard_numel_, part.like));
  }
  if (plan_.residence == Residence::whole) comm_.all_gather(memory_, shard_).released();
}

FlatGroup::OwnPart FlatGroup::own_part_of(const FlatSlot& slot) const {
  const int64_t begin = comm_.rank() * shard_numel_;
  const int64_t from = std::clamp(slot.offset, begin, begin + shard_numel_);
  const int64_t to = std::clamp(slot.offset + real_numel(slot.parameter), begin, begin + shard_numel_);
  const int64_t numel = (to - from) / (slot.parameter.is_complex() ? 2 : 1);
  return {from, at::empty({numel}, slot.parameter.options().device(at::kMeta).requires_grad(false))};
}

std::vector<int64_t> FlatGroup::cuts(const FlatSlot& slot) const {
  const int64_t unit = slot.parameter.is_complex() ? 2 : 1;
  std::vector<int64_t> cuts;
  for (int64_t r = 0; r <= comm_.size(); ++r) {
    cuts.push_back(std::clamp<int64_t>(r * shard_numel_ - slot.offset, 0, real_numel(slot.parameter)) / unit);
  }
  return cuts;
}

void FlatGroup::make_shard_views() {
  if (!plan_.trainable) return;
  const memory::Scope scope(memory::Category::gradients);
  if (!plan_.keep_full_gradients) shard_gradients_ = replicas_.allocate({shard_numel_}, memory_.options().dtype(plan_.gradient_dtype)).zero_();
  if (plan_.keep_full_gradients) {
    full_gradients_ = reductions_.allocate({numel_}, memory_.options().dtype(plan_.gradient_dtype)).zero_();
    shard_gradients_ = own_part(full_gradients_);
  }
  const int64_t begin = comm_.rank() * shard_numel_;
  for (FlatSlot& slot : slots_) {
    const auto [from, like] = own_part_of(slot);
    slot.shard = part_of(shard_, from - begin, like).requires_grad_(true);
    slot.shard_grad = part_of(shard_gradients_, shard_gradients_.storage_offset() + from - begin, like);
  }
}

int64_t FlatGroup::gradient_bytes() const {
  return plan_.trainable && !plan_.keep_full_gradients ? numel_ * static_cast<int64_t>(c10::elementSize(plan_.gradient_dtype)) : 0;
}

void FlatGroup::start_gather() {
  const memory::Scope scope(memory::Category::parameters);
  if (plan_.residence == Residence::whole) {
    gather_ = comm_.all_gather(memory_, shard_);
    return;
  }
  if (!holds_data_) restore_data(full_);
  holds_data_ = true;
  gather_ = comm_.all_gather(full_, shard_.to(full_.device()));  // the shard itself, unless it is kept on the host beside a device
}

void FlatGroup::start_gather_near() {
  if (!near_part_.defined()) return start_gather();
  const memory::Scope scope(memory::Category::parameters);
  if (!holds_data_) restore_data(full_);
  holds_data_ = true;
  near_sent_ = std::exchange(near_part_, at::Tensor());
  near_gather_ = near_.all_gather(full_, near_sent_);
}

void FlatGroup::finish_gather() {
  gather_.wait();
  near_gather_.wait();
  near_gather_ = {};  // it keeps the part alive, too
  near_sent_.reset();
  if (plan_.residence == Residence::whole) set_current();
}

void FlatGroup::reshard() {
  if (near_.size() > 1 && holds_data_) {
    near_part_.reset();
    finish_gather();
    const at::NoGradGuard no_grad;
    const memory::Scope scope(memory::Category::parameters);
    const int64_t part = numel_ / near_.size();
    at::Tensor copy = full_.narrow(0, near_.rank() * part, part).clone();
    release();
    near_part_ = std::move(copy);
  } else {
    release();
  }
}

void FlatGroup::release() {
  near_part_.reset();
  if (plan_.residence == Residence::whole || !holds_data_) return;
  finish_gather();
  release_data(full_, message_);
  holds_data_ = false;
}

void FlatGroup::set_stale() { plan_.residence == Residence::whole ? forbid_access(full_, message_) : release(); }

void FlatGroup::set_current() {
  if (plan_.residence == Residence::whole) allow_access(full_);
}

void FlatGroup::keep_written() {
  if (plan_.residence == Residence::whole || !holds_data_) return;
  const at::NoGradGuard no_grad;
  shard_.copy_(own_part(full_));
}

void FlatGroup::open_round() {
  launched_ = false;
  missing_ = static_cast<int64_t>(slots_.size());
  for (FlatSlot& slot : slots_) slot.ready = false;
}

void FlatGroup::mark_ready(FlatSlot& slot) {
  if (!slot.parameter.grad().defined()) return;  // another part of this backward may still give it one
  if (launched_) {
    throw ConfigError("parameter '" + slot.name + "' received a gradient after its group was reduced: it is used in more than one "
                      "part of this backward (reentrant recomputation does that). Set DataParallelOptions::overlap = false, or "
                      "use non-reentrant recomputation");
  }
  if (!std::exchange(slot.ready, true)) --missing_;
}

bool FlatGroup::at_home(const FlatSlot& slot) const {
  return slot.parameter.storage().unsafeGetStorageImpl() == full_.storage().unsafeGetStorageImpl();
}

/// What the shard holds from earlier rounds that nobody has zeroed: this round adds to it.
void FlatGroup::keep_earlier() {
  const auto holds = [](const FlatSlot& slot) { return slot.kept || slot.shard.grad().defined(); };
  adds_ = std::any_of(slots_.begin(), slots_.end(), holds);
  if (!adds_) return;
  for (FlatSlot& slot : slots_) {
    const at::Tensor& grad = slot.shard.grad();
    if (!holds(slot)) {
      slot.shard_grad.zero_();
    } else if (!slot.kept && !is_view_of(grad, slot.shard_grad)) {
      slot.shard_grad.copy_(grad);
    }
  }
  // With a buffer of their own the new gradients land on top of the reduced ones.
  if (plan_.keep_full_gradients) earlier_ = shard_gradients_.clone();
}

void FlatGroup::begin_gradients(GradientPool& pool) {
  if (has_gradients_) return;
  has_gradients_ = true;
  reduction_.released();
  keep_earlier();
  if (!plan_.keep_full_gradients) full_gradients_ = pool.take(numel_, plan_.gradient_dtype, buffer_);
}

bool FlatGroup::adopt(FlatSlot& slot, GradientPool& pool) {
  const at::NoGradGuard no_grad;
  if (!at_home(slot)) throw ConfigError(moved_text(slot.name));
  at::Tensor& grad = slot.parameter.mutable_grad();
  if (!grad.defined()) return false;
  if (grad.layout() != at::kStrided) throw ConfigError(sparse_text(slot.name));
  begin_gradients(pool);
  const at::Tensor view = gradient_view(slot);
  if (is_view_of(grad, view)) return false;
  view.copy_(grad.detach());
  grad = view;
  return true;
}

void FlatGroup::launch(GradientPool& pool, Reduction how) {
  const at::NoGradGuard no_grad;
  begin_gradients(pool);
  for (FlatSlot& slot : slots_) {
    slot.used = slot.parameter.grad().defined();
    if (slot.used) {
      adopt(slot, pool);
      slot.parameter.mutable_grad().reset();  // from here on it is part of a sum over ranks
    } else {
      gradient_view(slot).zero_();
    }
  }
  start_reduction(how);
}

void FlatGroup::launch_failed(GradientPool& pool, Reduction how) {
  const at::NoGradGuard no_grad;
  begin_gradients(pool);
  full_gradients_.zero_();
  for (FlatSlot& slot : slots_) slot.used = false;
  start_reduction(how);
}

void FlatGroup::start_reduction(Reduction how) {
  launched_ = in_flight_ = true;
  taken_over_ = merged_ = false;
  how_ = how;
  if (travels_apart()) {
    const memory::Scope scope(memory::Category::communication);
    const at::ScalarType dtype = plan_.reduce_dtype.value_or(plan_.gradient_dtype);
    wire_ = at::empty({shard_numel_}, full_gradients_.options().dtype(dtype));
    wire_input_ = full_gradients_.to(dtype);
    reduction_ = reductions_.reduce_scatter(wire_, wire_input_, how_.op);
    if (buffer_ != nullptr && wire_input_.is_same(full_gradients_)) buffer_->last = reduction_;
    give_back_buffer();
    return;
  }
  // In place where the shard holds earlier sums, or is a part of the buffer.
  const bool in_place = adds_ || plan_.keep_full_gradients;
  reduction_ = reductions_.reduce_scatter(in_place ? own_part(full_gradients_) : shard_gradients_, full_gradients_, how_.op);
  if (buffer_ != nullptr) buffer_->last = reduction_;
  if (!in_place) give_back_buffer();
}

bool FlatGroup::take_over_unless_needed() {
  if (!reduction_.wait_unless_needed()) return false;
  take_over();
  return true;
}

void FlatGroup::take_over() {
  if (!in_flight_ || std::exchange(taken_over_, true)) return;
  const at::NoGradGuard no_grad;
  reduction_.wait();  // its result, which only this rank touches: peers may go on reading their parts of the buffer
  wire_input_.reset();
  if (wire_.defined()) reduction_ = {};  // it keeps the tensors alive
  const bool across = how_.across && replicas_.size() > 1;
  const bool earlier_is_whole = adds_ && !partial_;
  partial_ = how_.across ? false : replicas_.size() > 1;
  if (across && earlier_is_whole && wire_.defined()) {  // what was reduced before is not rounded again
    across_ = replicas_.all_reduce(wire_, how_.op);
    return;
  }
  // Sums over all replicas are about to be added up over the replicas once more.
  merge(earlier_is_whole && how_.op == ReduceOp::sum ? 1.0 / replicas_.size() : 1.0);
  if (!across) {
    wire_.reset();
    return;
  }
  if (wire_.defined()) wire_.copy_(shard_gradients_);
  across_ = replicas_.all_reduce(wire_.defined() ? wire_ : shard_gradients_, how_.op);
}

/// Brings what was reduce-scattered into the shard, to `earlier_counts` times what it held.
void FlatGroup::merge(double earlier_counts) {
  merged_ = true;
  if (plan_.keep_full_gradients || !adds_) {
    if (wire_.defined()) shard_gradients_.copy_(wire_);
    if (adds_) shard_gradients_.add_(earlier_, earlier_counts);
  } else {
    const memory::Scope scope(memory::Category::communication);
    if (earlier_counts != 1.0) shard_gradients_.mul_(earlier_counts);
    shard_gradients_.add_(wire_.defined() ? wire_.to(shard_gradients_.device(), plan_.gradient_dtype) : own_part(full_gradients_));
  }
  earlier_.reset();
  give_back_buffer();
}

void FlatGroup::give_back_buffer() {
  if (buffer_ != nullptr) buffer_->taken = false;
  buffer_ = nullptr;
  if (!plan_.keep_full_gradients) full_gradients_.reset();
}

void FlatGroup::collect() {
  if (!in_flight_) return;
  const at::NoGradGuard no_grad;
  take_over();
  in_flight_ = false;
  // released(), not only wait(): whoever clips or zeroes next writes here, and peers may still read.
  if (plan_.keep_full_gradients) reduction_.released();
  across_.released();
  if (wire_.defined()) {
    merged_ ? static_cast<void>(shard_gradients_.copy_(wire_)) : merge(1.0);
    wire_.reset();
    across_ = {};
  }
  has_gradients_ = false;
}

bool FlatGroup::holds_partial_sums() const {
  return std::any_of(slots_.begin(), slots_.end(), [](const FlatSlot& slot) { return slot.kept; });
}

void FlatGroup::present(const float* used) {
  for (size_t i = 0; i < slots_.size(); ++i) {
    FlatSlot& slot = slots_[i];
    const bool defined = used[i] > 0.0F || (adds_ && (slot.kept || slot.shard.grad().defined()));
    slot.kept = defined && partial_;
    slot.shard.mutable_grad() = defined && !partial_ ? slot.shard_grad : at::Tensor();
  }
}

void FlatGroup::drop_local() {
  for (FlatSlot& slot : slots_) slot.parameter.mutable_grad().reset();
  if (!in_flight_ && has_gradients_) {
    give_back_buffer();
    has_gradients_ = false;
  }
}

void FlatGroup::drop_reduced() {
  partial_ = false;
  for (FlatSlot& slot : slots_) {
    slot.kept = false;
    slot.shard.mutable_grad().reset();
  }
}

}  // namespace weft::parallel
