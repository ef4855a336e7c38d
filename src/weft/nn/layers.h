// The small layers: linear, embedding, norm. Parameters are allocated, not initialised (see nn/init.h).
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "weft/model/spec.h"
#include "weft/nn/kernels.h"

namespace weft::nn {

/// y [..., out] = x [..., in] weight^T + bias. weight [out, in], bias [out].
class LinearImpl : public torch::nn::Module {
 public:
  LinearImpl(int64_t in, int64_t out, bool with_bias, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;
  at::Tensor bias;  ///< undefined without bias
};
TORCH_MODULE(Linear);

/// tokens (int64, any shape) -> rows of weight [rows, hidden].
class EmbeddingImpl : public torch::nn::Module {
 public:
  EmbeddingImpl(int64_t rows, int64_t hidden, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& tokens);

  at::Tensor weight;
};
TORCH_MODULE(Embedding);

/// RMSNorm (Zhang and Sennrich 2019) or LayerNorm over the last dim, statistics in fp32 for 16-bit inputs.
class NormImpl : public torch::nn::Module {
 public:
  NormImpl(int64_t size, model::NormKind kind, bool with_bias, double eps, Kernels kernels, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;
  at::Tensor bias;  ///< undefined without bias

 private:
  model::NormKind kind_;
  double eps_;
  Kernels kernels_;
};
TORCH_MODULE(Norm);

}  // namespace weft::nn
