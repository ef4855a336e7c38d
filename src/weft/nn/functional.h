// The arithmetic of a decoder's layers as functions with a choice of kernels. All are differentiable.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "weft/model/spec.h"
#include "weft/nn/kernels.h"

namespace weft::nn {

/// x / sqrt(mean(x^2) + eps) * weight over the last dim. x [..., D], weight [D].
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, Kernels kernels);

/// activation(x).
at::Tensor activate(const at::Tensor& x, model::Activation activation);

/// activation(gate) * up, both [..., F]. SiLU is the SwiGLU of Shazeer 2020.
at::Tensor gated(const at::Tensor& gate, const at::Tensor& up, model::Activation activation, Kernels kernels);

/// Sum of the losses of all tokens whose target is not ignore_index, and their number.
struct LossSum {
  at::Tensor sum;     ///< scalar; fp64 for fp64 models, else fp32
  int64_t valid = 0;
};
/// For Units that return one (nn/unit.h).
inline void collect_tensors(const LossSum& loss, std::vector<at::Tensor>& out) { out.push_back(loss.sum); }

/// Cross-entropy of the logits hidden [N, D] weight^T [V, D] against targets [N] (int64). `softcap` > 0 first maps
/// logits to cap * tanh(logits / cap). Softmax and sum are fp32 for 16-bit models. Fused: logits exist for a few hundred
/// rows at a time; both gradients are formed in the forward pass when gradients are enabled (Hsu et al. 2024,
/// "Liger Kernel", section 3), so only one [N, D] and one [V, D] tensor are kept for backward.
LossSum linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets,
                             int64_t ignore_index, double softcap, Kernels kernels);

/// How many targets are not ignore_index. ConfigError for one that is no id of `vocab` tokens. Meta targets have no values: all count.
int64_t count_targets(const at::Tensor& targets, int64_t ignore_index, int64_t vocab);

/// cap * tanh(logits / cap); logits unchanged for cap 0.
at::Tensor soft_cap(const at::Tensor& logits, double cap);

}  // namespace weft::nn
