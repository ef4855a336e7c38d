#include "weft/model/hf_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "weft/core/error.h"
#include "weft/core/nearest.h"

namespace weft::model {
namespace {

/// Keys without influence on what the model computes or how large it is: identity, tokens, generation, storage, loss weights.
const std::set<std::string>& inert_keys() {
  static const std::set<std::string> kKeys = {
      "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "auto_map", "_name_or_path", "pretraining_tp",
      "output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "router_jitter_noise", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
      "summary_use_proj", "task_specific_params", "n_ctx", "gradient_checkpointing", "max_window_layers", "ep_size", "cache_implementation", "classifier_dropout", "is_decoder", "add_cross_attention",
      "reorder_and_upcast_attn", "rope_interleave", "initializer_range", "head_dim", "qk_head_dim", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout",
      "tie_word_embeddings", "max_position_embeddings", "n_positions", "original_max_position_embeddings", "vocab_size", "num_hidden_layers", "n_layer", "hidden_size", "n_embd",
      "num_attention_heads", "n_head", "intermediate_size", "n_inner", "num_key_value_heads", "hidden_act", "hidden_activation", "activation_function", "rms_norm_eps", "layer_norm_eps",
      "layer_norm_epsilon", "norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "rotary_pct", "rotary_emb_base", "partial_rotary_factor", "rope_local_base_freq", "decoder_sparse_step", "mlp_only_layers"};
  return kKeys;
}

class Reader {
 public:
  Reader(const Json& config, std::string source) : config_(config), source_(std::move(source)) {}

  bool has(const std::string& key) const { return config_.contains(key) && !config_.at(key).is_null(); }

  int64_t integer(std::initializer_list<const char*> keys) {
    for (const char* key : keys)
      if (has(key)) return typed<int64_t>(key, 0);
    std::vector<std::string> present;
    for (const auto& item : config_.items()) present.push_back(item.key());
    findings_.add(*keys.begin(), "is missing, and the size of the model depends on it", did_you_mean(*keys.begin(), present));
    return 0;
  }
  template <typename T>
  T optional(std::initializer_list<const char*> keys, T otherwise) {
    for (const char* key : keys) {
      used_.insert(key);
      if (has(key)) return typed<T>(key, otherwise);
    }
    return otherwise;
  }
  /// A key whose other values would change the mathematics in a way that ModelSpec cannot say.
  template <typename T>
  void only(const char* key, T value, const char* why) {
    used_.insert(key);
    if (has(key) && typed<T>(key, value) != value) findings_.add(key, fmt::format("{} is not supported: {}", config_.at(key).dump(), why));
  }
  void use(const char* key) { used_.insert(key); }
  const Json& at(const char* key) const { return config_.at(key); }
  Findings& findings() { return findings_; }

  void finish() {
    std::vector<std::string> known(inert_keys().begin(), inert_keys().end());
    known.insert(known.end(), used_.begin(), used_.end());
    for (const auto& item : config_.items())
      if (inert_keys().count(item.key()) == 0 && used_.count(item.key()) == 0 && !item.value().is_null())
        findings_.add(item.key(), "is not a key that Weft knows, so it may change the mathematics", did_you_mean(item.key(), known));
    findings_.throw_if_any(source_);
  }

 private:
  template <typename T>
  T typed(const std::string& key, T otherwise) {
    used_.insert(key);
    try {
      return config_.at(key).get<T>();
    } catch (const nlohmann::json::exception&) {
      findings_.add(key, fmt::format("holds {}, which has the wrong type", config_.at(key).dump()));
      return otherwise;
    }
  }

  const Json& config_;
  std::string source_;
  Findings findings_;
  std::set<std::string> used_;
};

Activation activation_of(Reader& reader, const char* otherwise) {
  const std::string name = reader.optional<std::string>({"hidden_activation", "hidden_act", "activation_function"}, otherwise);
  if (name == "silu" || name == "swish") return Activation::silu;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_new" || name == "gelu_pytorch_tanh" || name == "gelu_fast") return Activation::gelu_tanh;
  if (name == "relu") return Activation::relu;
  if (name == "relu2") return Activation::relu_squared;
  reader.findings().add("hidden_act", "\"" + name + "\" is not supported", "use silu, gelu, gelu_new, gelu_pytorch_tanh, relu or relu2");
  return Activation::silu;
}

void read_rope_table(const Json& table, RopeSpec& rope, Findings& findings) {
  rope.theta = table.value("rope_theta", rope.theta);
  rope.fraction = table.value("partial_rotary_factor", rope.fraction);
  std::string type = table.value("rope_type", table.value("type", std::string("default")));
  if (type == "default") type = "none";
  if (type == "dynamic" || type == "longrope") findings.add("rope_scaling", "type \"" + type + "\" is not supported", "use none, linear, llama3 or yarn");
  rope.scaling = type;
  rope.factor = table.value("factor", rope.factor);
  rope.low_freq_factor = table.value("low_freq_factor", rope.low_freq_factor);
  rope.high_freq_factor = table.value("high_freq_factor", rope.high_freq_factor);
  rope.original_context = table.value("original_max_position_embeddings", rope.original_context);
}

void read_rope(Reader& reader, RopeSpec& rope) {
  rope.theta = reader.optional<double>({"rope_theta", "rotary_emb_base"}, rope.theta);
  rope.fraction = reader.optional<double>({"rotary_pct", "partial_rotary_factor"}, rope.fraction);
  rope.local_theta = reader.optional<double>({"rope_local_base_freq"}, 0.0);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!reader.has(key)) continue;
    const Json& table = reader.at(key);
    if (!table.is_object()) {
      reader.findings().add(key, fmt::format("holds {}, which is not a table", table.dump()));
    } else if (table.contains("full_attention")) {  // Gemma 3: one table per kind of layer
      read_rope_table(table.at("full_attention"), rope, reader.findings());
      if (table.contains("sliding_attention")) rope.local_theta = table.at("sliding_attention").value("rope_theta", rope.theta);
    } else {
      read_rope_table(table, rope, reader.findings());
    }
  }
}

/// Which layers look at a window: listed, or every pattern-th one is full (Gemma 2: every second, Gemma 3: every sixth).
void read_windows(Reader& reader, ModelSpec& spec) {
  const int64_t window = reader.optional<int64_t>({"sliding_window"}, 0);
  const bool enabled = reader.optional<bool>({"use_sliding_window"}, true);
  const int64_t pattern = reader.optional<int64_t>({"sliding_window_pattern", "_sliding_window_pattern"}, spec.family == "gemma2" ? 2 : 0);
  reader.use("layer_types");
  if (window == 0 || !enabled) return;
  for (size_t layer = 0; layer < spec.blocks.size(); ++layer) {
    bool local = pattern == 0 || (static_cast<int64_t>(layer) + 1) % pattern != 0;
    if (reader.has("layer_types") && layer < reader.at("layer_types").size()) local = reader.at("layer_types")[layer] == "sliding_attention";
    if (local) spec.blocks[layer].attention.window = window;
  }
}

BlockSpec common_block(Reader& reader, ModelSpec& spec) {
  BlockSpec block;
  spec.hidden = reader.integer({"hidden_size", "n_embd"});
  spec.vocab = reader.integer({"vocab_size"});
  spec.context = reader.integer({"max_position_embeddings", "n_positions"});
  block.attention.heads = reader.integer({"num_attention_heads", "n_head"});
  block.attention.kv_heads = reader.optional<int64_t>({"num_key_value_heads"}, block.attention.heads);
  block.attention.head_dim = reader.optional<int64_t>({"head_dim"}, block.attention.heads > 0 ? spec.hidden / block.attention.heads : 0);
  block.mlp.ffn = reader.optional<int64_t>({"intermediate_size", "n_inner"}, 0);
  spec.norm_eps = reader.optional<double>({"rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"}, 1e-5);
  spec.init_std = reader.optional<double>({"initializer_range"}, 0.02);
  spec.tied_head = reader.optional<bool>({"tie_word_embeddings"}, false);
  return block;
}

void read_llama(Reader& reader, ModelSpec& spec, BlockSpec& block) {
  block.mlp.activation = activation_of(reader, "silu");
  const bool bias = reader.optional<bool>({"attention_bias"}, false);
  block.attention.qkv_bias = spec.family == "qwen2" || bias;
  block.attention.out_bias = bias;
  block.mlp.bias = reader.optional<bool>({"mlp_bias"}, false);
  block.attention.qk_norm = spec.family.starts_with("qwen3") || spec.family == "gemma3_text";
  reader.only<bool>("use_bidirectional_attention", false, "only causal models are built");
}

void read_gemma(Reader& reader, ModelSpec& spec, BlockSpec& block) {
  read_llama(reader, spec, block);
  spec.tied_head = reader.optional<bool>({"tie_word_embeddings"}, true);
  spec.embedding_scale = std::sqrt(static_cast<double>(spec.hidden));
  if (spec.family == "gemma") return;
  block.norms = 4;
  block.attention.softcap = reader.optional<double>({"attn_logit_softcapping"}, 0.0);
  spec.logit_softcap = reader.optional<double>({"final_logit_softcapping"}, 0.0);
  block.attention.scale = 1.0 / std::sqrt(reader.optional<double>({"query_pre_attn_scalar"}, static_cast<double>(block.attention.head_dim)));
}

void read_gpt2(Reader& reader, ModelSpec& spec, BlockSpec& block) {
  spec.norm = NormKind::layer;
  spec.norm_bias = true;
  spec.position = PositionKind::learned;
  spec.tied_head = reader.optional<bool>({"tie_word_embeddings"}, true);
  spec.dropout = reader.optional<double>({"resid_pdrop"}, 0.0);
  block.attention.qkv_bias = block.attention.out_bias = block.mlp.bias = true;
  block.mlp.gated = false;
  block.mlp.activation = activation_of(reader, "gelu_new");
  if (block.mlp.ffn == 0) block.mlp.ffn = 4 * spec.hidden;
  reader.only<bool>("scale_attn_weights", true, "scores are divided by the square root of the head size");
  reader.only<bool>("scale_attn_by_inverse_layer_idx", false, "scores do not depend on the layer");
}

void read_neox(Reader& reader, ModelSpec& spec, BlockSpec& block) {
  spec.norm = NormKind::layer;
  spec.norm_bias = true;
  spec.rope.fraction = 0.25;
  const bool bias = reader.optional<bool>({"attention_bias"}, true);
  block.attention.qkv_bias = block.attention.out_bias = bias;
  block.mlp.bias = true;
  block.mlp.gated = false;
  block.mlp.activation = activation_of(reader, "gelu");
  block.parallel_residual = reader.optional<bool>({"use_parallel_residual"}, true);
}

/// Experts in every layer, or after the first dense ones (DeepSeek).
int64_t read_experts(Reader& reader, const ModelSpec& spec, MoeSpec& moe) {
  moe.experts = reader.integer({"n_routed_experts", "num_experts", "num_local_experts"});
  moe.top_k = reader.integer({"num_experts_per_tok"});
  const bool mixtral = spec.family == "mixtral";
  moe.expert_ffn = mixtral ? reader.integer({"intermediate_size"}) : reader.integer({"moe_intermediate_size"});
  moe.normalize_top_k = mixtral || reader.optional<bool>({"norm_topk_prob"}, false);
  moe.shared_ffn = reader.optional<int64_t>({"n_shared_experts"}, 0) * moe.expert_ffn;
  if (const int64_t shared = reader.optional<int64_t>({"shared_expert_intermediate_size"}, 0); shared > 0) moe.shared_ffn = shared, moe.shared_gate = true;
  moe.correction_bias = spec.family == "deepseek_v3";
  for (const char* key : {"n_group", "topk_group", "routed_scaling_factor", "topk_method", "scoring_func", "moe_layer_freq"}) reader.use(key);
  return reader.optional<int64_t>({"first_k_dense_replace"}, 0);
}

void read_latent(Reader& reader, BlockSpec& block) {
  LatentAttention latent;
  latent.q_lora_rank = reader.optional<int64_t>({"q_lora_rank"}, 0);
  latent.kv_lora_rank = reader.integer({"kv_lora_rank"});
  latent.qk_nope_dim = reader.integer({"qk_nope_head_dim"});
  latent.qk_rope_dim = reader.integer({"qk_rope_head_dim"});
  latent.v_dim = reader.integer({"v_head_dim"});
  block.attention.latent = latent;
}

void check_values(Reader& reader, const ModelSpec& spec, int64_t layers) {
  if (layers < 1) reader.findings().add("num_hidden_layers", fmt::format("{}; the rule is >= 1", layers));
  if (spec.hidden < 1) reader.findings().add("hidden_size", fmt::format("{}; the rule is >= 1", spec.hidden));
  if (spec.vocab < 1) reader.findings().add("vocab_size", fmt::format("{}; the rule is >= 1", spec.vocab));
}

}  // namespace

ModelSpec spec_from_hf(const Json& config, const std::string& source) {
  if (!config.is_object()) throw ConfigError(source + " is not a JSON object");
  Reader reader(config, source);
  ModelSpec spec;
  spec.family = reader.optional<std::string>({"model_type"}, "");
  spec.name = spec.family;
  static const std::vector<std::string> kFamilies = {"llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"};
  if (std::find(kFamilies.begin(), kFamilies.end(), spec.family) == kFamilies.end())
    throw ConfigError(source + ": model_type \"" + spec.family + "\" is not supported; " + did_you_mean(spec.family, kFamilies));
  BlockSpec block = common_block(reader, spec);
  const int64_t layers = reader.integer({"num_hidden_layers", "n_layer"});
  if (spec.family == "gpt2") read_gpt2(reader, spec, block);
  else if (spec.family == "gpt_neox") read_neox(reader, spec, block);
  else if (spec.family.starts_with("gemma")) read_gemma(reader, spec, block);
  else read_llama(reader, spec, block);
  if (spec.position == PositionKind::rope) read_rope(reader, spec.rope);
  const bool deepseek = spec.family.starts_with("deepseek");
  if (deepseek) read_latent(reader, block);
  const bool experts = deepseek || spec.family == "mixtral" || spec.family.ends_with("_moe");
  MoeSpec moe;
  const int64_t dense = experts ? read_experts(reader, spec, moe) : 0;
  spec.mtp_layers = reader.optional<int64_t>({"num_nextn_predict_layers"}, 0);
  check_values(reader, spec, layers);
  spec.blocks.assign(static_cast<size_t>(std::clamp<int64_t>(layers, 0, 100000)), block);
  for (size_t layer = static_cast<size_t>(dense); experts && layer < spec.blocks.size(); ++layer) spec.blocks[layer].moe = moe;
  read_windows(reader, spec);
  reader.finish();
  return spec;
}

ModelSpec read_hf_config(const std::filesystem::path& path) { return spec_from_hf(read_json(path), path.string()); }

}  // namespace weft::model
