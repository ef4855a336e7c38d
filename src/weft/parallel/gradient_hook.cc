#include "weft/parallel/gradient_hook.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

#include "weft/core/error.h"

namespace weft::parallel {
namespace {

using torch::autograd::PostAccumulateGradHook;

class GradientHook : public PostAccumulateGradHook {
 public:
  GradientHook(std::unique_ptr<PostAccumulateGradHook> earlier, std::function<void()> fn, std::function<void()> backward_begins)
      : earlier_(std::move(earlier)), fn_(std::move(fn)), backward_begins_(std::move(backward_begins)) {}
  void operator()(const torch::autograd::Variable& parameter) override {
    if (earlier_) (*earlier_)(parameter);
    fn_();
  }
  std::unique_ptr<PostAccumulateGradHook> take_earlier() { return std::move(earlier_); }
  const std::function<void()>& backward_begins() const { return backward_begins_; }

 private:
  std::unique_ptr<PostAccumulateGradHook> earlier_;
  std::function<void()> fn_, backward_begins_;
};

}  // namespace

void watch_gradient(const at::Tensor& parameter, const std::string& name, std::function<void()> fn,
                    std::function<void()> backward_begins) {
  auto& slot = torch::autograd::impl::post_acc_grad_hooks(parameter);
  if (dynamic_cast<GradientHook*>(slot.get()) != nullptr) {
    throw ConfigError("parameter '" + name + "' belongs to another DataParallel already. Wrap each parameter once, or "
                      "destroy the first wrapper");
  }
  auto hook = std::make_unique<GradientHook>(std::move(slot), std::move(fn), std::move(backward_begins));
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(hook));
}

std::function<void()> backward_begin_of(const at::Tensor& parameter) {
  const auto* hook = dynamic_cast<const GradientHook*>(torch::autograd::impl::post_acc_grad_hooks(parameter).get());
  return hook != nullptr ? hook->backward_begins() : std::function<void()>();
}

void unwatch_gradient(const at::Tensor& parameter) {
  auto& slot = torch::autograd::impl::post_acc_grad_hooks(parameter);
  if (auto* hook = dynamic_cast<GradientHook*>(slot.get())) {
    auto earlier = hook->take_earlier();
    slot = std::move(earlier);
  }
}

}  // namespace weft::parallel
