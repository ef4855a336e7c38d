// Operators that libtorch has no meta kernel for: nothing is computed, and what its CPU kernels allocate is allocated.
#pragma once

#include <ATen/core/Tensor.h>

namespace weft::nn {

/// q [B, H, T, hd], k and v [B, Hkv, S, hd], meta -> [B, H, T, hd], laid out as scaled_dot_product_attention lays it out on the
/// CPU when it takes its flash kernel (no mask, or causal). Differentiable once. On the meta device the operator decomposes into
/// whole score matrices, which the CPU never holds.
at::Tensor attention_shapes(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

/// x [..., D], weight and bias [D] (bias may be undefined), meta -> [..., D]. Differentiable once.
at::Tensor layer_norm_shapes(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

/// weight [V, D], tokens [...] int64, meta -> [..., D]. Differentiable once.
at::Tensor embedding_shapes(const at::Tensor& weight, const at::Tensor& tokens);

}  // namespace weft::nn
