// Activations in host memory between forward and backward.
#pragma once

#include <memory>
#include <unordered_set>

#include "weft/autograd/saved_tensors.h"

namespace torch::nn {
class Module;
}

namespace weft::autograd {

/// What autograd saves is copied to the host and copied back when backward asks for it, but for parameters and buffers of the
/// module. Tensors that are on the host already stay where they are.
class HostCopies final : public SavedTensors {
 public:
  explicit HostCopies(const torch::nn::Module* module);
  std::unique_ptr<torch::autograd::SavedVariableHooks> hook() override;

 private:
  std::unordered_set<const void*> held_;  // memory of the module's tensors
};

}  // namespace weft::autograd
