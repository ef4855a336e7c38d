#include "weft/model/spec.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "weft/core/error.h"

namespace weft::model {
namespace {

/// Appends parameters in registration order and knows the initialisation rules of the model.
class TableBuilder {
 public:
  explicit TableBuilder(const ModelSpec& spec)
      : spec_(spec), residual_std_(spec.init_std / std::sqrt(2.0 * static_cast<double>(std::max<int64_t>(1, spec.layers())))) {}

  void matrix(const std::string& name, std::vector<int64_t> shape, int tp_dim, ParamKind kind = ParamKind::matrix) {
    add(name + ".weight", std::move(shape), kind, tp_dim, {InitRule::Kind::normal, spec_.init_std});
  }
  /// An output projection into the residual stream: std / sqrt(2 L), as in GPT-2.
  void residual(const std::string& name, std::vector<int64_t> shape, int tp_dim, ParamKind kind = ParamKind::matrix) {
    add(name + ".weight", std::move(shape), kind, tp_dim, {InitRule::Kind::normal, residual_std_});
  }
  void bias(const std::string& name, std::vector<int64_t> shape, int tp_dim) {
    add(name + ".bias", std::move(shape), ParamKind::bias, tp_dim, {InitRule::Kind::zeros, 0.0});
  }
  void norm(const std::string& name, int64_t size, bool with_bias) {
    add(name + ".weight", {size}, ParamKind::norm, -1, {InitRule::Kind::ones, 0.0});
    if (with_bias) add(name + ".bias", {size}, ParamKind::norm, -1, {InitRule::Kind::zeros, 0.0});
  }
  void linear(const std::string& name, int64_t out, int64_t in, bool column, bool with_bias, bool into_residual = false) {
    if (into_residual) residual(name, {out, in}, column ? 0 : 1);
    else matrix(name, {out, in}, column ? 0 : 1);
    if (with_bias) bias(name, {out}, column ? 0 : -1);
  }
  void replicated(const std::string& name, int64_t out, int64_t in) { matrix(name, {out, in}, -1); }

  void set_layer(int64_t layer) { layer_ = layer; }
  std::vector<Param> take() { return std::move(table_); }

 private:
  void add(std::string name, std::vector<int64_t> shape, ParamKind kind, int tp_dim, InitRule init) {
    table_.push_back({std::move(name), std::move(shape), kind, layer_, tp_dim, init});
  }

  const ModelSpec& spec_;
  double residual_std_;
  int64_t layer_ = -1;
  std::vector<Param> table_;
};

void add_latent_attention(TableBuilder& table, const std::string& prefix, const ModelSpec& spec, const AttentionSpec& attention) {
  const LatentAttention& latent = *attention.latent;
  const int64_t qk = latent.qk_nope_dim + latent.qk_rope_dim;
  if (latent.q_lora_rank > 0) {
    table.replicated(prefix + "wq_a", latent.q_lora_rank, spec.hidden);
    table.norm(prefix + "q_a_norm", latent.q_lora_rank, false);
    table.linear(prefix + "wq_b", attention.heads * qk, latent.q_lora_rank, true, false);
  } else {
    table.linear(prefix + "wq", attention.heads * qk, spec.hidden, true, false);
  }
  table.replicated(prefix + "wkv_a", latent.kv_lora_rank + latent.qk_rope_dim, spec.hidden);
  table.norm(prefix + "kv_a_norm", latent.kv_lora_rank, false);
  table.linear(prefix + "wkv_b", attention.heads * (latent.qk_nope_dim + latent.v_dim), latent.kv_lora_rank, true, false);
  table.linear(prefix + "wo", spec.hidden, attention.heads * latent.v_dim, false, attention.out_bias, true);
}

void add_attention(TableBuilder& table, const std::string& prefix, const ModelSpec& spec, const AttentionSpec& attention) {
  if (attention.latent) return add_latent_attention(table, prefix, spec, attention);
  const int64_t q = attention.heads * attention.head_dim, kv = attention.kv_heads * attention.head_dim;
  table.linear(prefix + "wq", q, spec.hidden, true, attention.qkv_bias);
  table.linear(prefix + "wk", kv, spec.hidden, true, attention.qkv_bias);
  table.linear(prefix + "wv", kv, spec.hidden, true, attention.qkv_bias);
  table.linear(prefix + "wo", spec.hidden, q, false, attention.out_bias, true);
  if (attention.qk_norm) {
    table.norm(prefix + "q_norm", attention.head_dim, false);
    table.norm(prefix + "k_norm", attention.head_dim, false);
  }
}

void add_mlp(TableBuilder& table, const std::string& prefix, int64_t hidden, int64_t ffn, const MlpSpec& mlp) {
  table.linear(prefix + "w1", ffn, hidden, true, mlp.bias);
  if (mlp.gated) table.linear(prefix + "w3", ffn, hidden, true, mlp.bias);
  table.linear(prefix + "w2", hidden, ffn, false, mlp.bias, true);
}

void add_moe(TableBuilder& table, const std::string& prefix, int64_t hidden, const MoeSpec& moe, const MlpSpec& mlp) {
  table.matrix(prefix + "router", {moe.experts, hidden}, -1, ParamKind::router);
  if (moe.correction_bias) table.bias(prefix + "router", {moe.experts}, -1);
  const int64_t width = moe.latent_dim > 0 ? moe.latent_dim : hidden;
  if (moe.latent_dim > 0) table.replicated(prefix + "down", width, hidden);
  table.matrix(prefix + "w1", {moe.experts, moe.expert_ffn, width}, 1, ParamKind::expert);
  if (mlp.gated) table.matrix(prefix + "w3", {moe.experts, moe.expert_ffn, width}, 1, ParamKind::expert);
  table.residual(prefix + "w2", {moe.experts, width, moe.expert_ffn}, 2, ParamKind::expert);
  if (moe.latent_dim > 0) table.replicated(prefix + "up", hidden, width);
  if (moe.shared_ffn > 0) add_mlp(table, prefix + "shared.", hidden, moe.shared_ffn, mlp);
  if (moe.shared_gate) table.replicated(prefix + "shared_gate", 1, hidden);
}

void add_block(TableBuilder& table, const std::string& prefix, const ModelSpec& spec, const BlockSpec& block) {
  const bool after = block.norms == 4;
  table.norm(prefix + "norm1", spec.hidden, spec.norm_bias);
  add_attention(table, prefix + "attn.", spec, block.attention);
  if (after) table.norm(prefix + "norm1_after", spec.hidden, spec.norm_bias);
  if (block.norms >= 2) table.norm(prefix + "norm2", spec.hidden, spec.norm_bias);
  if (block.moe) add_moe(table, prefix + "moe.", spec.hidden, *block.moe, block.mlp);
  else add_mlp(table, prefix + "ffn.", spec.hidden, block.mlp.ffn, block.mlp);
  if (after) table.norm(prefix + "norm2_after", spec.hidden, spec.norm_bias);
}

}  // namespace

int64_t Param::numel() const { return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()); }

std::vector<Param> parameter_table(const ModelSpec& spec) {
  if (spec.mtp_layers > 0 && spec.blocks.empty())
    throw ConfigError("mtp_layers = " + std::to_string(spec.mtp_layers) + ": a prediction module repeats the last block, and there is none");
  TableBuilder table(spec);
  table.matrix("tok", {spec.vocab, spec.hidden}, 0, ParamKind::embedding);
  if (spec.position == PositionKind::learned) table.matrix("pos", {spec.context, spec.hidden}, -1, ParamKind::position);
  if (spec.embedding_norm) table.norm("tok_norm", spec.hidden, spec.norm_bias);
  for (int64_t layer = 0; layer < spec.layers(); ++layer) {
    table.set_layer(layer);
    add_block(table, "layers." + std::to_string(layer) + ".", spec, spec.blocks[static_cast<size_t>(layer)]);
  }
  table.set_layer(-1);
  table.norm("norm", spec.hidden, spec.norm_bias);
  if (!spec.tied_head) table.matrix("head", {spec.vocab, spec.hidden}, 0, ParamKind::head);
  for (int64_t module = 0; module < spec.mtp_layers; ++module) {
    const std::string prefix = "mtp." + std::to_string(module) + ".";
    table.norm(prefix + "embedding_norm", spec.hidden, spec.norm_bias);
    table.norm(prefix + "hidden_norm", spec.hidden, spec.norm_bias);
    table.replicated(prefix + "join", spec.hidden, 2 * spec.hidden);
    add_block(table, prefix + "block.", spec, spec.blocks.back());
    table.norm(prefix + "norm", spec.hidden, spec.norm_bias);
  }
  return table.take();
}

int64_t parameter_count(const ModelSpec& spec) {
  int64_t total = 0;
  for (const Param& param : parameter_table(spec)) total += param.numel();
  return total;
}

}  // namespace weft::model
