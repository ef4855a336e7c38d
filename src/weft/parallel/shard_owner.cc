#include "weft/parallel/shard_owner.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

namespace weft::parallel {
namespace {

/// Autograd never accumulates into a shard; its hook slot carries the owner.
class Owner : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit Owner(std::function<void()> updated) : updated_(std::move(updated)) {}
  void operator()(const torch::autograd::Variable&) override {}
  void updated() const { updated_(); }

 private:
  std::function<void()> updated_;
};

}  // namespace

void set_owner(const at::Tensor& shard, std::function<void()> updated) {
  torch::autograd::impl::set_post_acc_grad_hooks(shard, std::make_unique<Owner>(std::move(updated)));
}

void notify_updated(const at::Tensor& parameter) {
  if (!parameter.requires_grad()) return;
  if (const auto* owner = dynamic_cast<const Owner*>(torch::autograd::impl::post_acc_grad_hooks(parameter).get())) owner->updated();
}

}  // namespace weft::parallel
