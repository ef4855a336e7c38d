#include "weft/cost/memory.h"

#include <algorithm>
#include <cmath>

#include "weft/core/error.h"
#include "weft/layout/part.h"

namespace weft::cost {

double StateBytes::per_parameter(int zero, double ranks) const {
  switch (zero) {
    case 0: return weight + gradient + optimizer;
    case 1: return weight + gradient + optimizer / ranks;
    case 2: return weight + (gradient + optimizer) / ranks;
    default: return (weight + gradient + optimizer) / ranks;
  }
}

double moment_bytes(const std::string& optimizer, const std::vector<int64_t>& shape, double wide) {
  constexpr double kBlock = 256, kLeastQuantised = 4096;  // of 8-bit moments (Dettmers et al. 2022; bitsandbytes)
  double n = 1;
  for (const int64_t size : shape) n *= static_cast<double>(size);
  const bool matrix = shape.size() >= 2 && n > 0;
  if (optimizer == "adamw") return 2 * wide * n;
  if (optimizer == "adamw_bf16") return 4 * n;
  if (optimizer == "adam8bit") return n < kLeastQuantised ? 2 * wide * n : 2 * n + 2 * wide * std::ceil(n / kBlock);
  if (optimizer == "lion" || optimizer == "sgd" || optimizer == "muon") return wide * n;
  if (optimizer == "adafactor") return wide * (matrix ? n / static_cast<double>(shape.back()) + static_cast<double>(shape.back()) : n);
  throw ConfigError("optimizer \"" + optimizer + "\" is not known; use adamw, adamw_bf16, adam8bit, lion, sgd, adafactor or muon");
}

double zero_state_bytes(double parameters, double ranks, int stage, double optimizer_bytes) {
  return parameters * StateBytes{2, 2, optimizer_bytes}.per_parameter(stage, ranks);
}

double zero_traffic_bytes(double parameters, double ranks, int stage, double bytes_per_parameter) {
  return (stage == 3 ? 3 : 2) * (ranks - 1) / ranks * parameters * bytes_per_parameter;
}

double classic_layer_bytes(double sequence, double batch, double hidden, double heads, double tp, ClassicForm form) {
  const double unit = sequence * batch * hidden, scores = 5 * heads * sequence / hidden;
  switch (form) {
    case ClassicForm::tensor: return unit * (10 + 24 / tp + scores / tp);
    case ClassicForm::sequence: return unit * (34 + scores) / tp;
    case ClassicForm::selective: return unit * 34 / tp;
    case ClassicForm::full: return 2 * unit;
  }
  return 0;
}

namespace {

double attention_bytes(const model::AttentionSpec& attention, const ActivationShape& shape, bool flash, bool dropout) {
  const double tokens = shape.tokens, tp = shape.tp;
  const auto [heads, keys] = layout::most_heads(attention, static_cast<int64_t>(tp));
  double bytes = 0;
  if (attention.latent) {
    // Compressed queries and keys (replicated), the rotary part, and the up-projected Q, K, V.
    const model::LatentAttention& latent = *attention.latent;
    const double qk = static_cast<double>(latent.qk_nope_dim + latent.qk_rope_dim), value = static_cast<double>(latent.v_dim);
    const double outer = shape.sequence_parallel ? tp : 1;
    bytes += 4 * tokens * static_cast<double>(latent.q_lora_rank + latent.kv_lora_rank) / outer + 2 * tokens * static_cast<double>(latent.qk_rope_dim) / outer;
    bytes += 2 * tokens * heads * (2 * qk + value) + 2 * tokens * heads * value;
  } else {
    const double dim = static_cast<double>(attention.head_dim);
    bytes += 4 * tokens * heads * dim + 4 * tokens * keys * dim;
  }
  if (flash) return bytes + 4 * tokens * heads;
  // Softmax output, dropout mask and dropout output.
  return bytes + tokens * heads * shape.sequence * (dropout ? 5 : 2);
}

double mlp_bytes(const model::MlpSpec& mlp, double rows, double ffn, bool low_precision, const machine::Software& software) {
  if (software.recompute_mlp) return 0;
  // Gated: gate, up and product; plain: input and output of the activation. The product feeds a GEMM: 1 byte in fp8.
  const double product = software.recompute_activation ? 0 : low_precision ? 1 : 2;
  return ((mlp.gated ? 4 : 2) + product) * rows * ffn;
}

/// Operation-level recompute (torch "selective"): attention's output and every second matrix product are kept, that is Q, V,
/// the gate and the output of the MLP; keys, the projection after attention, the up product and all elementwise results are
/// computed again.
double selected_bytes(const model::BlockSpec& block, double hidden, const ActivationShape& shape) {
  const model::AttentionSpec& attention = block.attention;
  const auto [heads, keys] = layout::most_heads(attention, static_cast<int64_t>(shape.tp));
  const double outer = shape.sequence_parallel ? shape.tp : 1;
  double query = heads * static_cast<double>(attention.head_dim), value = query;
  double kv = keys * static_cast<double>(attention.head_dim);
  if (attention.latent) {
    query = heads * static_cast<double>(attention.latent->qk_nope_dim + attention.latent->qk_rope_dim);
    value = kv = heads * static_cast<double>(attention.latent->v_dim);
  }
  const double core = 2 * shape.tokens * (query + kv + value) + 4 * shape.tokens * heads;
  if (!block.moe) return core + 2 * shape.tokens * (static_cast<double>(block.mlp.ffn) / shape.tp + hidden / outer);
  const model::MoeSpec& moe = *block.moe;
  const double rows = shape.tokens / shape.tp * static_cast<double>(moe.top_k) * shape.etp * shape.imbalance;
  return core + 2 * rows * (static_cast<double>(moe.expert_ffn) / shape.etp + hidden) + 2 * shape.tokens * static_cast<double>(moe.shared_ffn) / shape.tp;
}

}  // namespace

BlockBytes block_bytes(const model::BlockSpec& block, double hidden, bool layer_norm, const ActivationShape& shape, const machine::Software& software) {
  BlockBytes bytes;
  const double outer = shape.sequence_parallel ? shape.tp : 1, rows = shape.tokens / outer;
  const bool flash = software.attention == machine::Software::Attention::flash;
  // Per norm: its input and its output, which is the input of the next product.
  const double norm_output = software.recompute_norms ? 0 : shape.low_precision ? 1 : 2;
  bytes.norms = block.norms * rows * hidden * (2 + norm_output);
  // Eager RMSNorm keeps fp32 copies of its input and of the normalised value.
  if (software.kernels == machine::Software::Kernels::eager && !layer_norm) bytes.copies = block.norms * rows * hidden * 8;
  if (software.dropout) bytes.masks = 2 * rows * hidden;
  bytes.attention = attention_bytes(block.attention, shape, flash, software.dropout);
  if (!block.moe) {
    bytes.mlp = mlp_bytes(block.mlp, shape.tokens, static_cast<double>(block.mlp.ffn) / shape.tp, shape.low_precision, software);
    return bytes;
  }
  const model::MoeSpec& moe = *block.moe;
  const double routed = shape.tokens / shape.tp * static_cast<double>(moe.top_k) * shape.etp * shape.imbalance;
  bytes.experts = 4 * routed * (moe.latent_dim > 0 ? static_cast<double>(moe.latent_dim) : hidden) + mlp_bytes(block.mlp, routed, static_cast<double>(moe.expert_ffn) / shape.etp, shape.low_precision, software);
  bytes.experts += 6 * rows * static_cast<double>(moe.experts) + 6 * rows * static_cast<double>(moe.top_k);
  if (moe.shared_ffn > 0) bytes.mlp = mlp_bytes(block.mlp, shape.tokens, static_cast<double>(moe.shared_ffn) / shape.tp, shape.low_precision, software);
  return bytes;
}

double kept_bytes(const model::BlockSpec& block, const BlockBytes& bytes, double hidden, const ActivationShape& shape, layout::Recompute recompute, bool flash) {
  const double input = 2 * shape.tokens * hidden / (shape.sequence_parallel ? shape.tp : 1);
  switch (recompute) {
    case layout::Recompute::none: return bytes.total();
    case layout::Recompute::full: return input;
    case layout::Recompute::half: return std::min(bytes.total(), input + selected_bytes(block, hidden, shape));
    case layout::Recompute::attention: break;
  }
  if (flash) return bytes.total();
  // Q, K, V and the output stay; scores and masks go.
  const double tokens = shape.tokens;
  const double scores = bytes.attention;
  return bytes.norms + bytes.copies + bytes.mlp + bytes.experts + bytes.masks + std::min(scores, 8 * tokens * hidden / shape.tp);
}

double in_flight(const std::string& schedule, int64_t pp, int64_t chunks, int64_t micro_batches, int64_t stage) {
  const double m = static_cast<double>(micro_batches);
  const int64_t depth = pp - stage;
  if (schedule == "gpipe") return m;
  // Counted up to W, which zero-bubble schedules put off: every stage reaches the bound.
  if (schedule == "zb-h2") return std::min(m, static_cast<double>(2 * pp - 1));
  if (schedule == "zb-v" || schedule == "zb-h1") return std::min(m, static_cast<double>(pp));
  if (schedule != "1f1b" && schedule != "interleaved")
    throw ConfigError("schedule \"" + schedule + "\" is not known; use gpipe, 1f1b, interleaved, zb-h1, zb-h2 or zb-v");
  if (chunks <= 1) return std::min(m, static_cast<double>(depth));
  const double v = static_cast<double>(chunks);
  const double held = 2 * static_cast<double>(depth - 1) + (v - 1) * static_cast<double>(pp) + 1;
  return std::min(m * v, held) / v;
}

double weight_bytes(double parameters, double bits, double group, double scale_bits) {
  return parameters * (bits + (group > 0 ? scale_bits / group : 0)) / 8;
}

double kv_cache_bytes_per_token(const model::ModelSpec& spec, double bytes_per_value) {
  double values = 0;
  for (const model::BlockSpec& block : spec.blocks) {
    if (block.attention.latent) values += static_cast<double>(block.attention.latent->kv_lora_rank + block.attention.latent->qk_rope_dim);
    else values += 2 * static_cast<double>(block.attention.kv_heads * block.attention.head_dim);
  }
  return values * bytes_per_value;
}

}  // namespace weft::cost
