// FLOPs of a model per token, and the widths that they follow from.
#include <algorithm>

#include "weft/cost/block.h"
#include "weft/cost/widths.h"
#include "weft/layout/part.h"

namespace weft::cost {

Widths widths_of(const model::AttentionSpec& attention, double tp) {
  Widths widths;
  const layout::HeadCounts most = layout::most_heads(attention, static_cast<int64_t>(tp));
  widths.heads = most.queries;
  if (attention.latent) {
    const model::LatentAttention& latent = *attention.latent;
    widths.head_dim = static_cast<double>(latent.qk_nope_dim + latent.qk_rope_dim);
    widths.q = widths.heads * widths.head_dim;
    widths.kv = widths.q;
    widths.value = widths.heads * static_cast<double>(latent.v_dim);
    return widths;
  }
  widths.head_dim = static_cast<double>(attention.head_dim);
  widths.q = widths.heads * widths.head_dim;
  widths.kv = most.keys * widths.head_dim;
  widths.value = widths.q;
  return widths;
}

double reach(const model::AttentionSpec& attention, double sequence, bool causal) {
  double tokens = causal ? sequence / 2 : sequence;
  if (attention.window > 0) tokens = std::min(tokens, static_cast<double>(attention.window));
  return tokens;
}

double block_linear_flops(const model::BlockSpec& block, double hidden) {
  const model::AttentionSpec& attention = block.attention;
  double weights = 0;
  if (attention.latent) {
    const model::LatentAttention& latent = *attention.latent;
    const double heads = static_cast<double>(attention.heads), qk = static_cast<double>(latent.qk_nope_dim + latent.qk_rope_dim);
    const double q_rank = static_cast<double>(latent.q_lora_rank), kv_rank = static_cast<double>(latent.kv_lora_rank);
    weights += q_rank > 0 ? hidden * q_rank + q_rank * heads * qk : hidden * heads * qk;
    weights += hidden * (kv_rank + static_cast<double>(latent.qk_rope_dim)) + kv_rank * heads * static_cast<double>(latent.qk_nope_dim + latent.v_dim);
    weights += hidden * heads * static_cast<double>(latent.v_dim);
  } else {
    weights += 2 * hidden * static_cast<double>((attention.heads + attention.kv_heads) * attention.head_dim);
  }
  const double matrices = block.mlp.gated ? 3 : 2;
  if (block.moe) {
    const double width = block.moe->latent_dim > 0 ? static_cast<double>(block.moe->latent_dim) : hidden;
    weights += matrices * (width * static_cast<double>(block.moe->top_k * block.moe->expert_ffn) + hidden * static_cast<double>(block.moe->shared_ffn));
    if (block.moe->latent_dim > 0) weights += 2 * hidden * width;
    weights += hidden * static_cast<double>(block.moe->experts);
  } else {
    weights += matrices * hidden * static_cast<double>(block.mlp.ffn);
  }
  return 2 * weights;
}

double block_attention_flops(const model::BlockSpec& block, double sequence, bool causal) {
  const Widths widths = widths_of(block.attention, 1);
  return 2 * reach(block.attention, sequence, causal) * (widths.q + widths.value);
}

double training_flops(const model::ModelSpec& spec, double sequence, bool causal) {
  const double hidden = static_cast<double>(spec.hidden);
  double forward = 2 * hidden * static_cast<double>(spec.vocab);
  for (const model::BlockSpec& block : spec.blocks) forward += block_linear_flops(block, hidden) + block_attention_flops(block, sequence, causal);
  if (spec.mtp_layers > 0)
    forward += static_cast<double>(spec.mtp_layers) *
               (block_linear_flops(spec.blocks.back(), hidden) + block_attention_flops(spec.blocks.back(), sequence, causal) + 4 * hidden * hidden + 2 * hidden * static_cast<double>(spec.vocab));
  return 3 * forward;
}

}  // namespace weft::cost
