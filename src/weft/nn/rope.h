// Rotary position embedding (Su et al. 2021) in the half-rotation convention of Llama's HF weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "weft/model/spec.h"
#include "weft/nn/kernels.h"

namespace weft::nn {

/// cos and sin, each [positions, rotated]: the angles of the first half are repeated in the second.
struct RopeTable {
  at::Tensor cos;
  at::Tensor sin;
};

/// Number of leading channels of a head that are rotated: fraction * head_dim, even. ConfigError if it cannot be.
int64_t rotated_channels(const model::RopeSpec& spec, int64_t head_dim);

/// Table for positions 0 .. positions - 1, fp64 for fp64 models and fp32 otherwise. Scaling none, linear, llama3
/// (as in HF configs); ConfigError for others.
RopeTable rope_table(const model::RopeSpec& spec, int64_t head_dim, int64_t positions, const at::TensorOptions& options);

/// x * cos + rotate_half(x) * sin on the rotated channels of q [B, T, H, hd] and k [B, T, Hkv, hd]; the rest of each head
/// passes through. table rows are the T positions of x.
std::pair<at::Tensor, at::Tensor> rope(const at::Tensor& q, const at::Tensor& k, const RopeTable& table, Kernels kernels);

}  // namespace weft::nn
