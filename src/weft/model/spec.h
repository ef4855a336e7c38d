// ModelSpec: a decoder-only language model as data. The planner counts it and models/ builds it from the same list.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace weft::model {

enum class NormKind { rms, layer };
enum class Activation { silu, gelu, gelu_tanh, relu, relu_squared };
enum class PositionKind { none, learned, rope, alibi };

/// Rotary embedding. `fraction` of each head is rotated (GPT-NeoX: 0.25). Scaling as in HF configs.
struct RopeSpec {
  double theta = 10000.0;
  double local_theta = 0.0;  ///< layers with a window (Gemma 3); 0 = theta
  double fraction = 1.0;
  std::string scaling = "none";  ///< none, linear, llama3, yarn
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  int64_t original_context = 0;
};

/// Multi-head latent attention (DeepSeek-V2, section 2.1). Ranks of the compressed projections and head sizes.
struct LatentAttention {
  int64_t q_lora_rank = 0;  ///< 0: queries are projected directly
  int64_t kv_lora_rank = 0;
  int64_t qk_nope_dim = 0;
  int64_t qk_rope_dim = 0;
  int64_t v_dim = 0;
};

struct AttentionSpec {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;  ///< read from the configuration; not always hidden / heads
  bool qkv_bias = false;
  bool out_bias = false;
  bool qk_norm = false;
  int64_t window = 0;      ///< sliding window in tokens; 0 = full
  double softcap = 0.0;    ///< scores -> cap * tanh(scores / cap); 0 = off
  double scale = 0.0;      ///< 0 = 1 / sqrt(head_dim)
  std::optional<LatentAttention> latent;
};

struct MlpSpec {
  int64_t ffn = 0;
  Activation activation = Activation::silu;
  bool gated = true;
  bool bias = false;
};

struct MoeSpec {
  int64_t experts = 0;
  int64_t top_k = 0;
  int64_t expert_ffn = 0;
  int64_t shared_ffn = 0;        ///< total width of the shared experts; 0 = none
  bool shared_gate = false;      ///< Qwen2-MoE's sigmoid gate on the shared expert
  bool normalize_top_k = false;
  bool correction_bias = false;  ///< DeepSeek-V3's balancing bias
  int64_t latent_dim = 0;        ///< experts work on a projection of this size (Nemotron 3 Super); 0 = hidden
};

/// One transformer block. With `moe` the MLP is replaced by experts (mlp gives activation, gating and bias).
struct BlockSpec {
  AttentionSpec attention;
  MlpSpec mlp;
  std::optional<MoeSpec> moe;
  bool parallel_residual = false;  ///< attention and MLP read the same input (GPT-NeoX, Falcon)
  int norms = 2;                   ///< 1: shared by both branches; 2: usual; 4: also after each branch (Gemma 2)
};

struct ModelSpec {
  std::string name;    ///< preset name or "custom"
  std::string family;  ///< llama, gpt2, mixtral, ... (HF model_type)
  int64_t hidden = 0;
  int64_t vocab = 0;
  int64_t context = 0;  ///< longest sequence; rows of a learned position table
  NormKind norm = NormKind::rms;
  double norm_eps = 1e-5;
  bool norm_bias = false;
  PositionKind position = PositionKind::rope;
  RopeSpec rope;
  bool tied_head = false;
  bool embedding_norm = false;     ///< BLOOM
  double embedding_scale = 1.0;    ///< Gemma: sqrt(hidden)
  double logit_softcap = 0.0;
  double dropout = 0.0;
  int64_t mtp_layers = 0;          ///< multi-token-prediction modules (DeepSeek-V3)
  double init_std = 0.02;
  std::vector<BlockSpec> blocks;

  int64_t layers() const { return static_cast<int64_t>(blocks.size()); }
};

enum class ParamKind { matrix, norm, bias, embedding, position, head, expert, router };

/// How a parameter starts. normal: mean 0, `std` already holds residual scaling (std / sqrt(2 L)).
struct InitRule {
  enum class Kind { zeros, ones, normal } kind = Kind::normal;
  double std = 0.02;
};

/// One parameter of the model, in the order in which the model registers it.
///
/// Names: tok.weight, pos.weight, layers.N.norm1.weight, layers.N.attn.{wq,wk,wv,wo}.{weight,bias},
/// layers.N.attn.{q_norm,k_norm}.weight, layers.N.norm2.weight, layers.N.ffn.{w1,w3,w2}.{weight,bias} (w1 is the gate or
/// only input projection, w3 the up projection of a gated MLP, w2 the output), norm.weight, head.weight.
/// Matrices are [out, in] as in torch::nn::Linear; embeddings [rows, hidden]. A tied head has no entry.
/// Rare parts: tok_norm (after the embedding), layers.N.{norm1_after,norm2_after} (norms = 4),
/// layers.N.attn.{wq_a,q_a_norm,wq_b,wkv_a,kv_a_norm,wkv_b,wo} (latent attention),
/// layers.N.moe.{router,w1,w3,w2,shared.w1,shared.w3,shared.w2,shared_gate} with experts stacked as [experts, out, in],
/// mtp.N.{embedding_norm,hidden_norm,join,block.*,norm} (embedding and head are shared with the model).
struct Param {
  std::string name;
  std::vector<int64_t> shape;
  ParamKind kind = ParamKind::matrix;
  int64_t layer = -1;   ///< block index; -1 outside blocks
  int tp_dim = -1;      ///< dim that tensor parallelism cuts; -1: replicated over tp
  InitRule init;

  int64_t numel() const;
};

/// Every parameter of the model. Names are unique; order is the registration order of models/.
std::vector<Param> parameter_table(const ModelSpec& spec);

/// Number of parameters, embeddings included; a tied head counts once.
int64_t parameter_count(const ModelSpec& spec);

}  // namespace weft::model
