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
  MlpImpl(int64_t hidden, const model::MlpSpec& spec, Kernels kernels, const at::TensorOptions& options,
          const TensorAxis& tp = {});
  at::Tensor forward(const at::Tensor& x);

  /// w3 only when gated; cut as w1, so that gate and up of an inner channel lie on one rank.
  Linear w1{nullptr}, w3{nullptr};
  RowLinear w2{nullptr};

 private:
  TensorAxis tp_;
  model::Activation activation_;
  Kernels kernels_;
};
TORCH_MODULE(Mlp);

}  // namespace weft::nn
