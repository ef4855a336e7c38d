#include "weft/parallel/bucket.h"

#include "weft/core/error.h"
#include "weft/layout/place.h"
#include "weft/parallel/agreement.h"
#include "weft/parallel/flat_view.h"

namespace weft::parallel {

bool is_view_of(const at::Tensor& grad, const at::Tensor& view) {
  return grad.layout() == at::kStrided && same_place(grad, view) && grad.dtype() == view.dtype() && grad.sizes() == view.sizes() &&
         grad.strides() == view.strides();
}

Bucket::Bucket(const std::vector<NamedTensor>& parameters, at::ScalarType gradient_dtype, const Comm& comm) {
  const at::NoGradGuard no_grad;
  std::vector<int64_t> numels;
  for (const NamedTensor& p : parameters) numels.push_back(real_numel(p.tensor));
  const layout::FlatPlan plan = layout::place(numels);
  const at::Tensor& first = parameters.front().tensor;
  const auto storage_dtype = c10::toRealValueType(first.scalar_type());

  flat_parameters_ = at::zeros({plan.numel}, first.options().dtype(storage_dtype).requires_grad(false));
  const auto slots = static_cast<int64_t>(parameters.size());
  flat_gradients_ = comm.allocate({plan.numel + slots + 1}, first.options().requires_grad(false).dtype(gradient_dtype)).zero_();
  gradients_ = flat_gradients_.narrow(0, 0, plan.numel);
  flags_ = flat_gradients_.narrow(0, plan.numel, slots + 1);
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor parameter = parameters[i].tensor;
    const at::Tensor home = part_of(flat_parameters_, plan.offsets[i], parameter);
    home.copy_(parameter);
    parameter.set_data(home);
    slots_.push_back({.name = parameters[i].name,
                      .parameter = parameter,
                      .grad_view = part_of(flat_gradients_, plan.offsets[i], parameter),
                      .storage = home.const_data_ptr()});
  }
}

void Bucket::open_round() {
  launched_ = false;
  missing_ = static_cast<int64_t>(slots_.size());
  for (Slot& slot : slots_) slot.ready = false;
}

void Bucket::mark_ready(Slot& slot) {
  if (!slot.parameter.grad().defined()) return;  // another part of this backward may still give it one
  if (launched_) {
    if (is_view_of(slot.parameter.grad(), slot.grad_view) && slot.grad_view._version() == slot.version) return;
    throw ConfigError("parameter '" + slot.name + "' received a gradient after its bucket was reduced: it is used in more "
                      "than one part of this backward (reentrant recomputation does that; or a nested backward threw before). "
                      "Set DataParallelOptions::overlap = false, or use non-reentrant recomputation");
  }
  if (!std::exchange(slot.ready, true)) --missing_;
}

bool Bucket::adopt_gradient(Slot& slot) {
  if (!slot.at_home()) throw ConfigError(moved_text(slot.name));
  at::Tensor& grad = slot.parameter.mutable_grad();
  if (!grad.defined() || is_view_of(grad, slot.grad_view)) return false;
  if (grad.layout() != at::kStrided) throw ConfigError(sparse_text(slot.name));
  const at::NoGradGuard no_grad;
  work_.released();
  slot.grad_view.copy_(grad.detach());
  slot.reduced = false;
  grad = slot.grad_view;
  return true;
}

void Bucket::launch(const Reduction& how, int64_t index) {
  const at::NoGradGuard no_grad;
  work_.released();
  std::vector<float> flags(slots_.size() + 1, 0.0F);
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].parameter.grad().defined()) {
      adopt_gradient(slots_[i]);
      slots_[i].version = slots_[i].grad_view._version();
      flags[i] = 1.0F;
    } else {
      slots_[i].grad_view.zero_();
    }
  }
  start(how, index, flags);
}

void Bucket::launch_failed(const Reduction& how, int64_t index) {
  const at::NoGradGuard no_grad;
  work_.released();
  gradients_.zero_();
  std::vector<float> flags(slots_.size() + 1, 0.0F);
  flags.back() = 1.0F;
  start(how, index, flags);
}

void Bucket::start(const Reduction& how, int64_t index, const std::vector<float>& flags) {
  flags_.copy_(at::from_blob(const_cast<float*>(flags.data()), {static_cast<int64_t>(flags.size())}, at::kFloat));
  launched_ = true;
  if (!how.hook) {
    work_ = how.comm.all_reduce(flat_gradients_, how.op);
    return;
  }
  finish_hook_ = how.hook({.bucket = index, .gradients = gradients_, .comm = how.comm, .op = how.op});
  work_ = how.comm.all_reduce(flags_, how.op);  // exact whatever the hook loses
}

bool Bucket::wait() {
  if (auto finish = std::exchange(finish_hook_, nullptr)) finish();
  // released(), not only wait(): whoever clips or zeroes next writes here, and peers may still read.
  work_.released();
  return number_of(flags_[flags_.numel() - 1]) == 0.0;
}

void Bucket::present() {
  if (flags_.is_meta()) {  // a rehearsal, where every rank does as this one: the slots have what they have
    for (Slot& slot : slots_) slot.reduced = true;
    return;
  }
  const at::Tensor flags = flags_.to(at::kFloat);
  const float* used = flags.const_data_ptr<float>();
  for (size_t i = 0; i < slots_.size(); ++i) {
    slots_[i].reduced = true;
    slots_[i].parameter.mutable_grad() = used[i] > 0.0F ? slots_[i].grad_view : at::Tensor();
  }
}

}  // namespace weft::parallel
