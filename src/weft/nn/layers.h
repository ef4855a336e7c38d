// The small layers: linear, embedding, norm. Parameters are allocated, not initialised (see nn/init.h).
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "weft/model/spec.h"
#include "weft/nn/kernels.h"
#include "weft/nn/tensor_axis.h"
#include "weft/nn/weight_gradients.h"

namespace weft::nn {

/// y [..., out] = x [..., in] weight^T + bias. weight [out, in], bias [out]. Cut by columns ("column parallel": between
/// TensorAxis::enter and leave) it is this layer with fewer outputs.
class LinearImpl : public torch::nn::Module, public SplitsBackward {
 public:
  /// copies: the ranks that hold the same weights and compute a part of their gradients each.
  LinearImpl(int64_t in, int64_t out, bool with_bias, const at::TensorOptions& options, Comm copies = Comm());
  at::Tensor forward(const at::Tensor& x);
  /// As forward uses them: their gradients are summed over the copies.
  at::Tensor used_weight() const;
  at::Tensor used_bias() const;

  at::Tensor weight;
  at::Tensor bias;  ///< undefined without bias

 private:
  Comm copies_;
};
TORCH_MODULE(Linear);

/// What layers that are cut by columns make of one input: TensorAxis::enter(x) through each of them.
std::vector<at::Tensor> column_products(const TensorAxis& tp, const at::Tensor& x, std::vector<Linear> layers);

/// A Linear that is cut by rows ("row parallel"): x [B, T, in of this rank] -> TensorAxis::leave of the partial sums, to which the
/// bias, the same on every rank, is added once.
class RowLinearImpl : public torch::nn::Module, public SplitsBackward {
 public:
  RowLinearImpl(int64_t in, int64_t out, bool with_bias, const at::TensorOptions& options, TensorAxis tp);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;
  at::Tensor bias;  ///< undefined without bias

 private:
  TensorAxis tp_;
};
TORCH_MODULE(RowLinear);

/// tokens (int64, any shape) -> rows of weight [rows, hidden].
class EmbeddingImpl : public torch::nn::Module {
 public:
  /// copies: as for Linear.
  EmbeddingImpl(int64_t rows, int64_t hidden, const at::TensorOptions& options, Comm copies = Comm());
  at::Tensor forward(const at::Tensor& tokens);

  at::Tensor weight;

 private:
  Comm copies_;
};
TORCH_MODULE(Embedding);

/// RMSNorm (Zhang and Sennrich 2019) or LayerNorm over the last dim, statistics in fp32 for 16-bit inputs.
class NormImpl : public torch::nn::Module {
 public:
  /// copies: as for Linear.
  NormImpl(int64_t size, model::NormKind kind, bool with_bias, double eps, Kernels kernels, const at::TensorOptions& options,
           Comm copies = Comm());
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;
  at::Tensor bias;  ///< undefined without bias

 private:
  model::NormKind kind_;
  double eps_;
  Kernels kernels_;
  Comm copies_;
};
TORCH_MODULE(Norm);

}  // namespace weft::nn
