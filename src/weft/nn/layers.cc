#include "weft/nn/layers.h"

#include <ATen/ATen.h>

#include "weft/autograd/recompute.h"
#include "weft/nn/functional.h"
#include "weft/nn/meta_shapes.h"

namespace weft::nn {

LinearImpl::LinearImpl(int64_t in, int64_t out, bool with_bias, const at::TensorOptions& options) {
  weight = register_parameter("weight", at::empty({out, in}, options));
  if (with_bias) bias = register_parameter("bias", at::empty({out}, options));
}

at::Tensor LinearImpl::forward(const at::Tensor& x) {
  return autograd::part(autograd::Part::matmul, {x}, [x, weight = weight, bias = bias] { return at::linear(x, weight, bias); });
}

EmbeddingImpl::EmbeddingImpl(int64_t rows, int64_t hidden, const at::TensorOptions& options) {
  weight = register_parameter("weight", at::empty({rows, hidden}, options));
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& tokens) {
  return weight.is_meta() ? embedding_shapes(weight, tokens) : at::embedding(weight, tokens);
}

NormImpl::NormImpl(int64_t size, model::NormKind kind, bool with_bias, double eps, Kernels kernels,
                   const at::TensorOptions& options)
    : kind_(kind), eps_(eps), kernels_(kernels) {
  weight = register_parameter("weight", at::empty({size}, options));
  if (with_bias) bias = register_parameter("bias", at::empty({size}, options));
}

at::Tensor NormImpl::forward(const at::Tensor& x) {
  if (kind_ == model::NormKind::rms) {
    at::Tensor y = rms_norm(x, weight, eps_, kernels_);
    return bias.defined() ? y + bias : y;
  }
  return x.is_meta() ? layer_norm_shapes(x, weight, bias) : at::layer_norm(x, weight.sizes(), weight, bias, eps_, false);
}

}  // namespace weft::nn
