#include "weft/models/block.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

namespace weft::models {

BlockImpl::BlockImpl(const model::ModelSpec& spec, int64_t layer, const TransformerOptions& options)
    : layer_(layer),
      parallel_residual_(spec.blocks[static_cast<size_t>(layer)].parallel_residual),
      attention_dropout_(spec.dropout, options.seed, fmt::format("layers.{}.attn", layer), spec.context),
      mlp_dropout_(spec.dropout, options.seed, fmt::format("layers.{}.ffn", layer), spec.context) {
  const model::BlockSpec& block = spec.blocks[static_cast<size_t>(layer)];
  const auto norm = [&](const char* name) {
    return register_module(
        name, nn::Norm(spec.hidden, spec.norm, spec.norm_bias, spec.norm_eps, options.kernels, options.parameter(),
                       options.tp.sequence_comm()));
  };
  norm1 = norm("norm1");
  attn = register_module("attn", nn::Attention(spec, block.attention, options.kernels, options.parameter(), options.tp));
  if (block.norms == 4) norm1_after = norm("norm1_after");
  if (block.norms >= 2) norm2 = norm("norm2");
  ffn = register_module("ffn", nn::Mlp(spec.hidden, block.mlp, options.kernels, options.parameter(), options.tp));
  if (block.norms == 4) norm2_after = norm("norm2_after");
}

at::Tensor BlockImpl::forward(const at::Tensor& x, const BlockInputs& inputs) {
  const auto attention = [&](const at::Tensor& normed) {
    at::Tensor y = attn(normed, inputs.rope, inputs.cache != nullptr ? &(*inputs.cache)[static_cast<size_t>(layer_)] : nullptr);
    if (norm1_after) y = norm1_after(y);
    return is_training() ? attention_dropout_(y, inputs.place) : y;
  };
  const auto mlp = [&](const at::Tensor& normed) {
    at::Tensor y = ffn(normed);
    if (norm2_after) y = norm2_after(y);
    return is_training() ? mlp_dropout_(y, inputs.place) : y;
  };
  const at::Tensor normed = norm1(x);
  if (parallel_residual_) return x + attention(normed) + mlp(norm2 ? norm2(x) : normed);
  const at::Tensor h = x + attention(normed);
  return h + mlp(norm2(h));
}

}  // namespace weft::models
