#include "weft/autograd/host_copies.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/nn/module.h>

#include "weft/autograd/kept_tensor.h"
#include "weft/core/error.h"

namespace weft::autograd {
namespace {

class OnHost final : public torch::autograd::SavedVariableHooks {
 public:
  explicit OnHost(const std::unordered_set<const void*>& held) : held_(&held) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    device_ = tensor.device();
    const bool stays = std::exchange(held_, nullptr)->count(memory_of(tensor)) > 0 || device_.is_cpu() || device_.is_meta();
    kept_ = KeptTensor::of(stays ? tensor : tensor.to(at::kCPU));
  }
  at::Tensor call_unpack_hook() override {
    if (!kept_.unchanged()) {
      throw ConfigError("a tensor that a backward needs has been modified by an in-place operation since its forward (activations of its "
                        "Unit are kept on the host). Run backward first, or modify a copy");
    }
    return kept_.alias.to(device_);
  }

 private:
  const std::unordered_set<const void*>* held_;  // alive while it packs
  at::Device device_ = at::kCPU;
  KeptTensor kept_;
};

}  // namespace

HostCopies::HostCopies(const torch::nn::Module* module) {
  if (module == nullptr) return;
  for (const auto& list : {module->parameters(), module->buffers()}) {
    for (const at::Tensor& tensor : list) held_.insert(memory_of(tensor));
  }
}

std::unique_ptr<torch::autograd::SavedVariableHooks> HostCopies::hook() { return std::make_unique<OnHost>(held_); }

}  // namespace weft::autograd
