#include "weft/nn/layers.h"

#include <ATen/ATen.h>

#include <utility>

#include "weft/autograd/collectives.h"
#include "weft/autograd/recompute.h"
#include "weft/nn/functional.h"
#include "weft/nn/meta_shapes.h"

namespace weft::nn {
namespace {

/// For use on a part of the tokens or heads: the gradient is the sum over the ranks that hold `weight` and use it on other parts.
at::Tensor shared_by(const Comm& copies, const at::Tensor& weight) {
  return copies.size() > 1 && weight.defined() ? autograd::copy_to(weight, copies) : weight;
}

}  // namespace

LinearImpl::LinearImpl(int64_t in, int64_t out, bool with_bias, const at::TensorOptions& options, Comm copies)
    : copies_(std::move(copies)) {
  weight = register_parameter("weight", at::empty({out, in}, options));
  if (with_bias) bias = register_parameter("bias", at::empty({out}, options));
}

at::Tensor LinearImpl::used_weight() const { return shared_by(copies_, weight); }
at::Tensor LinearImpl::used_bias() const { return shared_by(copies_, bias); }

at::Tensor LinearImpl::forward(const at::Tensor& x) {
  return autograd::part(autograd::Part::matmul, {x}, [x, this] { return linear(x, weight, bias, copies_); });
}

std::vector<at::Tensor> column_products(const TensorAxis& tp, const at::Tensor& x, std::vector<Linear> layers) {
  std::vector<at::Tensor> products;
  if (tp.overlaps()) {
    std::vector<at::Tensor> weights, biases;
    for (const Linear& layer : layers) {
      weights.push_back(layer->used_weight());
      biases.push_back(layer->used_bias());
    }
    return tp.enter_products(x, weights, biases);
  }
  const at::Tensor whole = tp.enter(x);
  for (Linear& layer : layers) products.push_back(layer(whole));
  return products;
}

RowLinearImpl::RowLinearImpl(int64_t in, int64_t out, bool with_bias, const at::TensorOptions& options, TensorAxis tp) : tp_(std::move(tp)) {
  weight = register_parameter("weight", at::empty({out, in}, options));
  if (with_bias) bias = register_parameter("bias", at::empty({out}, options));
}

at::Tensor RowLinearImpl::forward(const at::Tensor& x) {
  const bool alone = tp_.size() == 1;
  const auto plain = [&] {
    return autograd::part(autograd::Part::matmul, {x}, [=, this] { return linear(x, weight, alone ? bias : at::Tensor()); });
  };
  if (alone) return plain();
  const at::Tensor y = tp_.overlaps() ? tp_.product_leave(x, weight) : tp_.leave(plain());
  return bias.defined() ? y + shared_by(tp_.sequence_comm(), bias) : y;
}

EmbeddingImpl::EmbeddingImpl(int64_t rows, int64_t hidden, const at::TensorOptions& options, Comm copies) : copies_(std::move(copies)) {
  weight = register_parameter("weight", at::empty({rows, hidden}, options));
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& tokens) {
  const at::Tensor table = shared_by(copies_, weight);
  return weight.is_meta() ? embedding_shapes(table, tokens) : at::embedding(table, tokens);
}

NormImpl::NormImpl(int64_t size, model::NormKind kind, bool with_bias, double eps, Kernels kernels,
                   const at::TensorOptions& options, Comm copies)
    : kind_(kind), eps_(eps), kernels_(kernels), copies_(std::move(copies)) {
  weight = register_parameter("weight", at::empty({size}, options));
  if (with_bias) bias = register_parameter("bias", at::empty({size}, options));
}

at::Tensor NormImpl::forward(const at::Tensor& x) {
  const at::Tensor w = shared_by(copies_, weight), b = shared_by(copies_, bias);
  if (kind_ == model::NormKind::rms) {
    at::Tensor y = rms_norm(x, w, eps_, kernels_);
    return b.defined() ? y + b : y;
  }
  return x.is_meta() ? layer_norm_shapes(x, w, b) : at::layer_norm(x, w.sizes(), w, b, eps_, false);
}

}  // namespace weft::nn
