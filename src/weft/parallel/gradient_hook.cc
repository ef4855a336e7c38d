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
  GradientHook(std::unique_ptr<PostAccumulateGradHook> earlier, std::function<void()> fn)
      : earlier_(std::move(earlier)), fn_(std::move(fn)) {}
  void operator()(const torch::autograd::Variable& parameter) override {
    if (earlier_) (*earlier_)(parameter);
    fn_();
  }
  std::unique_ptr<PostAccumulateGradHook> take_earlier() { return std::move(earlier_); }

 private:
  std::unique_ptr<PostAccumulateGradHook> earlier_;
  std::function<void()> fn_;
};

}  // namespace

void watch_gradient(const at::Tensor& parameter, const std::string& name, std::function<void()> fn) {
  auto& slot = torch::autograd::impl::post_acc_grad_hooks(parameter);
  if (dynamic_cast<GradientHook*>(slot.get()) != nullptr) {
    throw ConfigError("parameter '" + name + "' belongs to another DataParallel already. Wrap each parameter once, or "
                      "destroy the first wrapper");
  }
  auto hook = std::make_unique<GradientHook>(std::move(slot), std::move(fn));
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(hook));
}

void unwatch_gradient(const at::Tensor& parameter) {
  auto& slot = torch::autograd::impl::post_acc_grad_hooks(parameter);
  if (auto* hook = dynamic_cast<GradientHook*>(slot.get())) {
    auto earlier = hook->take_earlier();
    slot = std::move(earlier);
  }
}

}  // namespace weft::parallel
