#include "weft/parallel/shard_owner.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

namespace weft {
namespace {

/// Autograd never accumulates into a shard; its hook slot carries the owner.
class Owner : public torch::autograd::PostAccumulateGradHook {
 public:
  Owner(ShardInfo info, std::function<void()> updated) : info_(std::move(info)), updated_(std::move(updated)) {}
  void operator()(const torch::autograd::Variable&) override {}
  const ShardInfo& info() const { return info_; }
  void updated() const { updated_(); }

 private:
  ShardInfo info_;
  std::function<void()> updated_;
};

const Owner* owner_of(const at::Tensor& tensor) {
  if (!tensor.requires_grad()) return nullptr;
  return dynamic_cast<const Owner*>(torch::autograd::impl::post_acc_grad_hooks(tensor).get());
}

}  // namespace

const ShardInfo* shard_info(const at::Tensor& tensor) {
  const Owner* owner = owner_of(tensor);
  return owner != nullptr ? &owner->info() : nullptr;
}

void parallel::set_owner(const at::Tensor& shard, ShardInfo info, std::function<void()> updated) {
  torch::autograd::impl::set_post_acc_grad_hooks(shard, std::make_unique<Owner>(std::move(info), std::move(updated)));
}

void parallel::notify_updated(const at::Tensor& parameter) {
  if (const Owner* owner = owner_of(parameter)) owner->updated();
}

}  // namespace weft
