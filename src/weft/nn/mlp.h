// The feed-forward half of a block.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "weft/model/spec.h"
#include "weft/nn/layers.h"

namespace weft::nn {

/// w2(act(w1 x) * w3 x) when gated, else w2(act(w1 x)). x [B, T, D] -> [B, T, D].
class MlpImpl : public torch::nn::Module {
 public:
  MlpImpl(int64_t hidden, const model::MlpSpec& spec, Kernels kernels, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& x);

  Linear w1{nullptr}, w3{nullptr}, w2{nullptr};  ///< w3 only when gated

 private:
  model::Activation activation_;
  Kernels kernels_;
};
TORCH_MODULE(Mlp);

}  // namespace weft::nn
