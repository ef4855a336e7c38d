#include "weft/nn/functional.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "weft/core/error.h"

namespace weft::nn {

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, Kernels kernels) {
  return at::rms_norm(x, weight.sizes(), weight, eps);
}

at::Tensor activate(const at::Tensor& x, model::Activation activation) {
  switch (activation) {
    case model::Activation::silu: return at::silu(x);
    case model::Activation::gelu: return at::gelu(x);
    case model::Activation::gelu_tanh: return at::gelu(x, "tanh");
    case model::Activation::relu: return at::relu(x);
    case model::Activation::relu_squared: return at::relu(x).square();
  }
  throw InternalError(fmt::format("activation {} has no implementation", static_cast<int>(activation)));
}

at::Tensor gated(const at::Tensor& gate, const at::Tensor& up, model::Activation activation, Kernels kernels) {
  return activate(gate, activation) * up;
}

at::Tensor soft_cap(const at::Tensor& logits, double cap) { return cap > 0 ? cap * at::tanh(logits / cap) : logits; }

LossSum linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets,
                             int64_t ignore_index, double softcap, Kernels kernels) {
  at::Tensor logits = at::linear(hidden, weight);
  if (logits.scalar_type() != at::kDouble) logits = logits.to(at::kFloat);
  logits = soft_cap(logits, softcap);
  return {at::cross_entropy_loss(logits, targets, {}, at::Reduction::Sum, ignore_index),
          at::sum(targets != ignore_index).item<int64_t>()};
}

}  // namespace weft::nn
