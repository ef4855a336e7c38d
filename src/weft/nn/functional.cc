#include "weft/nn/functional.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "weft/core/error.h"
#include "weft/nn/fused.h"

namespace weft::nn {

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, Kernels kernels) {
  if (kernels == Kernels::fused && fused::serves({x, weight})) return fused::rms_norm(x, weight, eps);
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
  if (kernels == Kernels::fused && activation == model::Activation::silu && gate.sizes() == up.sizes() && fused::serves({gate, up}))
    return fused::swiglu(gate, up);
  return activate(gate, activation) * up;
}

at::Tensor soft_cap(const at::Tensor& logits, double cap) { return cap > 0 ? cap * at::tanh(logits / cap) : logits; }

namespace {

void check_targets(const at::Tensor& targets, int64_t ignore_index, int64_t vocab) {
  if (!targets.is_cpu() || targets.numel() == 0) return;
  const int64_t* values = targets.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < targets.numel(); ++i)
    if (values[i] != ignore_index && (values[i] < 0 || values[i] >= vocab))
      throw ConfigError(fmt::format("target {} is {}; targets are token ids from 0 to {} or {} to be ignored. Check the "
                                    "vocabulary of the data.", i, values[i], vocab - 1, ignore_index));
}

}  // namespace

int64_t count_targets(const at::Tensor& targets, int64_t ignore_index, int64_t vocab) {
  check_targets(targets.contiguous(), ignore_index, vocab);
  return targets.is_meta() ? targets.numel() : at::sum(targets != ignore_index).item<int64_t>();
}

LossSum linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets,
                             int64_t ignore_index, double softcap, Kernels kernels) {
  const int64_t valid = count_targets(targets, ignore_index, weight.size(0));
  if (kernels == Kernels::fused && softcap == 0 && fused::serves({hidden, weight}))
    return {fused::linear_cross_entropy(hidden, weight, targets, ignore_index), valid};
  at::Tensor logits = at::linear(hidden, weight);
  if (logits.scalar_type() != at::kDouble) logits = logits.to(at::kFloat);
  logits = soft_cap(logits, softcap);
  return {at::cross_entropy_loss(logits, targets, {}, at::Reduction::Sum, ignore_index), valid};
}

}  // namespace weft::nn
