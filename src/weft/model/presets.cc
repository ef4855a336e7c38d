#include "weft/model/presets.h"

#include <cmath>

#include "weft/core/error.h"
#include "weft/core/nearest.h"

namespace weft::model {
namespace {

/// What a family has in common: everything but the sizes.
enum class Family { gpt2, gpt3, llama2, llama3, llama31, qwen2, qwen3, mistral, gemma1, gemma2, opt, bloom, falcon, neox, nemotron, phi3 };

/// Sizes of one dense model. head_dim 0 = hidden / heads; tied: -1 = the family's habit.
struct Size {
  const char* name;
  Family family;
  int64_t layers, hidden, heads, kv_heads, head_dim, ffn, vocab, context;
  int tied = -1;
};

// Sources: the models' papers and the config.json files that their authors publish.
constexpr Size kSizes[] = {
    // Test sizes: small enough for seconds on a CPU, different in every dimension so that mix-ups show.
    {"gpt2-tiny", Family::gpt2, 2, 32, 4, 4, 0, 128, 101, 64},
    {"llama-tiny", Family::llama3, 2, 32, 4, 2, 0, 88, 101, 64},
    {"llama-tiny-tied", Family::llama3, 2, 32, 4, 2, 0, 88, 101, 64, 1},
    {"llama-small", Family::llama3, 4, 128, 8, 4, 0, 352, 512, 256},
    {"gpt2", Family::gpt2, 12, 768, 12, 12, 0, 3072, 50257, 1024},
    {"gpt2-medium", Family::gpt2, 24, 1024, 16, 16, 0, 4096, 50257, 1024},
    {"gpt2-large", Family::gpt2, 36, 1280, 20, 20, 0, 5120, 50257, 1024},
    {"gpt2-xl", Family::gpt2, 48, 1600, 25, 25, 0, 6400, 50257, 1024},
    {"gpt3-1.3b", Family::gpt3, 24, 2048, 16, 16, 0, 8192, 51200, 2048},
    {"gpt3-2.7b", Family::gpt3, 32, 2560, 32, 32, 0, 10240, 51200, 2048},
    {"gpt3-6.7b", Family::gpt3, 32, 4096, 32, 32, 0, 16384, 51200, 2048},
    {"gpt3-13b", Family::gpt3, 40, 5120, 40, 40, 0, 20480, 51200, 2048},
    {"gpt-22b", Family::gpt3, 48, 6144, 64, 64, 0, 24576, 51200, 2048},
    {"gpt3-175b", Family::gpt3, 96, 12288, 96, 96, 0, 49152, 51200, 2048},
    {"mt-nlg-530b", Family::gpt3, 105, 20480, 128, 128, 0, 81920, 51200, 2048},
    {"gpt-1t", Family::gpt3, 128, 25600, 160, 160, 0, 102400, 51200, 2048},
    {"llama1-7b", Family::llama2, 32, 4096, 32, 32, 0, 11008, 32000, 2048},
    {"llama1-13b", Family::llama2, 40, 5120, 40, 40, 0, 13824, 32000, 2048},
    {"llama1-33b", Family::llama2, 60, 6656, 52, 52, 0, 17920, 32000, 2048},
    {"llama1-65b", Family::llama2, 80, 8192, 64, 64, 0, 22016, 32000, 2048},
    {"llama2-7b", Family::llama2, 32, 4096, 32, 32, 0, 11008, 32000, 4096},
    {"llama2-13b", Family::llama2, 40, 5120, 40, 40, 0, 13824, 32000, 4096},
    {"llama2-70b", Family::llama2, 80, 8192, 64, 8, 0, 28672, 32000, 4096},
    {"tinyllama-1.1b", Family::llama2, 22, 2048, 32, 4, 0, 5632, 32000, 2048},
    {"llama3-8b", Family::llama3, 32, 4096, 32, 8, 0, 14336, 128256, 8192},
    {"llama3-70b", Family::llama3, 80, 8192, 64, 8, 0, 28672, 128256, 8192},
    {"llama3.1-8b", Family::llama31, 32, 4096, 32, 8, 0, 14336, 128256, 131072},
    {"llama3.1-70b", Family::llama31, 80, 8192, 64, 8, 0, 28672, 128256, 131072},
    {"llama3.1-405b", Family::llama31, 126, 16384, 128, 8, 0, 53248, 128256, 131072},
    {"llama3.2-1b", Family::llama31, 16, 2048, 32, 8, 0, 8192, 128256, 131072, 1},
    {"llama3.2-3b", Family::llama31, 28, 3072, 24, 8, 0, 8192, 128256, 131072, 1},
    {"qwen2.5-0.5b", Family::qwen2, 24, 896, 14, 2, 0, 4864, 151936, 32768, 1},
    {"qwen2.5-1.5b", Family::qwen2, 28, 1536, 12, 2, 0, 8960, 151936, 32768, 1},
    {"qwen2.5-7b", Family::qwen2, 28, 3584, 28, 4, 0, 18944, 152064, 131072},
    {"qwen2.5-14b", Family::qwen2, 48, 5120, 40, 8, 0, 13824, 152064, 131072},
    {"qwen2.5-32b", Family::qwen2, 64, 5120, 40, 8, 0, 27648, 152064, 131072},
    {"qwen2.5-72b", Family::qwen2, 80, 8192, 64, 8, 0, 29568, 152064, 131072},
    {"qwen3-0.6b", Family::qwen3, 28, 1024, 16, 8, 128, 3072, 151936, 40960, 1},
    {"qwen3-1.7b", Family::qwen3, 28, 2048, 16, 8, 128, 6144, 151936, 40960, 1},
    {"qwen3-4b", Family::qwen3, 36, 2560, 32, 8, 128, 9728, 151936, 40960, 1},
    {"qwen3-8b", Family::qwen3, 36, 4096, 32, 8, 128, 12288, 151936, 40960},
    {"qwen3-14b", Family::qwen3, 40, 5120, 40, 8, 128, 17408, 151936, 40960},
    {"qwen3-32b", Family::qwen3, 64, 5120, 64, 8, 128, 25600, 151936, 40960},
    {"mistral-7b", Family::mistral, 32, 4096, 32, 8, 0, 14336, 32000, 32768},
    {"gemma-2b", Family::gemma1, 18, 2048, 8, 1, 256, 16384, 256000, 8192},
    {"gemma-7b", Family::gemma1, 28, 3072, 16, 16, 256, 24576, 256000, 8192},
    {"gemma2-2b", Family::gemma2, 26, 2304, 8, 4, 256, 9216, 256000, 8192},
    {"gemma2-9b", Family::gemma2, 42, 3584, 16, 8, 256, 14336, 256000, 8192},
    {"gemma2-27b", Family::gemma2, 46, 4608, 32, 16, 128, 36864, 256000, 8192},
    {"opt-125m", Family::opt, 12, 768, 12, 12, 0, 3072, 50272, 2050},
    {"opt-1.3b", Family::opt, 24, 2048, 32, 32, 0, 8192, 50272, 2050},
    {"opt-6.7b", Family::opt, 32, 4096, 32, 32, 0, 16384, 50272, 2050},
    {"opt-13b", Family::opt, 40, 5120, 40, 40, 0, 20480, 50272, 2050},
    {"opt-66b", Family::opt, 64, 9216, 72, 72, 0, 36864, 50272, 2050},
    {"opt-175b", Family::opt, 96, 12288, 96, 96, 0, 49152, 50272, 2050},
    {"bloom-7b1", Family::bloom, 30, 4096, 32, 32, 0, 16384, 250880, 2048},
    {"bloom-176b", Family::bloom, 70, 14336, 112, 112, 0, 57344, 250880, 2048},
    {"falcon-7b", Family::falcon, 32, 4544, 71, 1, 0, 18176, 65024, 2048},
    {"falcon-40b", Family::falcon, 60, 8192, 128, 8, 0, 32768, 65024, 2048},
    {"pythia-1b", Family::neox, 16, 2048, 8, 8, 0, 8192, 50304, 2048},
    {"pythia-6.9b", Family::neox, 32, 4096, 32, 32, 0, 16384, 50432, 2048},
    {"pythia-12b", Family::neox, 36, 5120, 40, 40, 0, 20480, 50688, 2048},
    {"gpt-neox-20b", Family::neox, 44, 6144, 64, 64, 0, 24576, 50432, 2048},
    {"nemotron4-15b", Family::nemotron, 32, 6144, 48, 8, 0, 24576, 256000, 4096},
    {"nemotron4-340b", Family::nemotron, 96, 18432, 96, 8, 0, 73728, 256000, 4096},
    {"phi3-mini", Family::phi3, 32, 3072, 32, 32, 0, 8192, 32064, 4096},
};

/// Sizes of one mixture-of-experts model.
struct ExpertSize {
  const char* name;
  const char* family;  ///< HF model_type
  int64_t layers, hidden, heads, kv_heads, head_dim, ffn, vocab, context;
  int64_t experts, top_k, expert_ffn, shared_ffn, dense_layers;
  double theta;
};

constexpr ExpertSize kExpertSizes[] = {
    {"moe-tiny", "mixtral", 2, 32, 4, 2, 8, 48, 101, 64, 4, 2, 48, 0, 0, 1e4},
    {"mla-tiny", "deepseek_v3", 2, 32, 4, 4, 0, 88, 101, 64, 8, 2, 24, 24, 1, 1e4},
    {"mixtral-8x7b", "mixtral", 32, 4096, 32, 8, 128, 14336, 32000, 32768, 8, 2, 14336, 0, 0, 1e6},
    {"mixtral-8x22b", "mixtral", 56, 6144, 48, 8, 128, 16384, 32768, 65536, 8, 2, 16384, 0, 0, 1e6},
    {"qwen3-30b-a3b", "qwen3_moe", 48, 2048, 32, 4, 128, 6144, 151936, 40960, 128, 8, 768, 0, 0, 1e6},
    {"qwen3-235b-a22b", "qwen3_moe", 94, 4096, 64, 4, 128, 12288, 151936, 40960, 128, 8, 1536, 0, 0, 1e6},
    {"deepseek-v2-lite", "deepseek_v2", 27, 2048, 16, 16, 0, 10944, 102400, 163840, 64, 6, 1408, 2816, 1, 1e4},
    {"deepseek-v2", "deepseek_v2", 60, 5120, 128, 128, 0, 12288, 102400, 163840, 160, 6, 1536, 3072, 1, 1e4},
    {"deepseek-v3", "deepseek_v3", 61, 7168, 128, 128, 0, 18432, 129280, 163840, 256, 8, 2048, 2048, 3, 1e4},
    {"kimi-k2", "deepseek_v3", 61, 7168, 64, 64, 0, 18432, 163840, 131072, 384, 8, 2048, 2048, 1, 5e4},
    {"moonlight-16b-a3b", "deepseek_v3", 27, 2048, 16, 16, 0, 11264, 163840, 8192, 64, 6, 1408, 2816, 1, 5e4},
};

void apply_gpt(ModelSpec& spec, BlockSpec& block) {
  spec.family = "gpt2";
  spec.norm = NormKind::layer;
  spec.norm_bias = true;
  spec.position = PositionKind::learned;
  spec.tied_head = true;
  block.attention.qkv_bias = block.attention.out_bias = true;
  block.mlp.gated = false;
  block.mlp.bias = true;
  block.mlp.activation = Activation::gelu_tanh;
}

void apply_llama(ModelSpec& spec, double theta) {
  spec.family = "llama";
  spec.norm = NormKind::rms;
  spec.rope.theta = theta;
}

void apply_llama31(ModelSpec& spec) {
  apply_llama(spec, 500000.0);
  spec.rope.scaling = "llama3";
  spec.rope.factor = spec.name.find("3.2") != std::string::npos ? 32.0 : 8.0;
  spec.rope.original_context = 8192;
}

void apply_gemma(ModelSpec& spec, BlockSpec& block, bool second) {
  apply_llama(spec, 10000.0);
  spec.family = second ? "gemma2" : "gemma";
  spec.norm_eps = 1e-6;
  spec.tied_head = true;
  spec.embedding_scale = std::sqrt(static_cast<double>(spec.hidden));
  block.mlp.activation = Activation::gelu_tanh;
  if (!second) return;
  block.norms = 4;
  block.attention.softcap = 50.0;
  spec.logit_softcap = 30.0;
  // Gemma 2 scales the scores by query_pre_attn_scalar: the head size, but hidden / heads in the 27B model.
  const double scalar = spec.hidden == 4608 ? 144.0 : static_cast<double>(block.attention.head_dim);
  block.attention.scale = 1.0 / std::sqrt(scalar);
}

void apply_parallel_block(ModelSpec& spec, BlockSpec& block, const char* family, int norms) {
  spec.family = family;
  spec.norm = NormKind::layer;
  spec.norm_bias = true;
  block.parallel_residual = true;
  block.norms = norms;
  block.mlp.gated = false;
  block.mlp.activation = Activation::gelu;
}

void apply_family(Family family, ModelSpec& spec, BlockSpec& block) {
  switch (family) {
    case Family::gpt2:
    case Family::gpt3: apply_gpt(spec, block); break;
    case Family::opt:
      apply_gpt(spec, block);
      spec.family = "opt";
      block.mlp.activation = Activation::relu;
      break;
    case Family::bloom:
      apply_gpt(spec, block);
      spec.family = "bloom";
      spec.position = PositionKind::alibi;
      spec.embedding_norm = true;
      break;
    case Family::llama2: apply_llama(spec, 10000.0); break;
    case Family::llama3: apply_llama(spec, 500000.0); break;
    case Family::llama31: apply_llama31(spec); break;
    case Family::qwen2:
      apply_llama(spec, 1000000.0);
      spec.family = "qwen2";
      spec.norm_eps = 1e-6;
      block.attention.qkv_bias = true;
      break;
    case Family::qwen3:
      apply_llama(spec, 1000000.0);
      spec.family = "qwen3";
      spec.norm_eps = 1e-6;
      block.attention.qk_norm = true;
      break;
    case Family::mistral:
      apply_llama(spec, 10000.0);
      spec.family = "mistral";
      block.attention.window = 4096;
      break;
    case Family::gemma1: apply_gemma(spec, block, false); break;
    case Family::gemma2: apply_gemma(spec, block, true); break;
    case Family::falcon:
      apply_parallel_block(spec, block, "falcon", block.attention.kv_heads > 1 ? 2 : 1);
      spec.tied_head = true;
      break;
    case Family::neox:
      apply_parallel_block(spec, block, "gpt_neox", 2);
      spec.rope.fraction = 0.25;
      block.attention.qkv_bias = block.attention.out_bias = block.mlp.bias = true;
      break;
    case Family::nemotron:
      apply_llama(spec, 10000.0);
      spec.family = "nemotron";
      spec.norm = NormKind::layer;
      spec.norm_bias = true;
      spec.rope.fraction = 0.5;
      block.mlp.gated = false;
      block.mlp.activation = Activation::relu_squared;
      break;
    case Family::phi3:
      apply_llama(spec, 10000.0);
      spec.family = "phi3";
      block.attention.window = 2047;
      break;
  }
}

ModelSpec make(const Size& size) {
  ModelSpec spec;
  spec.name = size.name;
  spec.hidden = size.hidden;
  spec.vocab = size.vocab;
  spec.context = size.context;
  BlockSpec block;
  block.attention.heads = size.heads;
  block.attention.kv_heads = size.kv_heads;
  block.attention.head_dim = size.head_dim > 0 ? size.head_dim : size.hidden / size.heads;
  block.mlp.ffn = size.ffn;
  apply_family(size.family, spec, block);
  if (size.tied >= 0) spec.tied_head = size.tied == 1;
  spec.blocks.assign(static_cast<size_t>(size.layers), block);
  if (size.family == Family::gemma2)  // every second layer looks at a window of 4,096 tokens
    for (size_t layer = 0; layer < spec.blocks.size(); layer += 2) spec.blocks[layer].attention.window = 4096;
  return spec;
}

ModelSpec make(const ExpertSize& size) {
  ModelSpec spec;
  spec.name = size.name;
  spec.family = size.family;
  spec.hidden = size.hidden;
  spec.vocab = size.vocab;
  spec.context = size.context;
  spec.rope.theta = size.theta;
  spec.norm_eps = 1e-6;
  const bool deepseek = spec.family.starts_with("deepseek"), tiny = size.hidden == 32;
  BlockSpec block;
  block.attention.heads = size.heads;
  block.attention.kv_heads = size.kv_heads;
  block.attention.head_dim = size.head_dim > 0 ? size.head_dim : size.hidden / size.heads;
  block.attention.qk_norm = spec.family == "qwen3_moe";
  // Sizes of the DeepSeek papers; models of less than 5,120 hidden project queries directly.
  if (deepseek && tiny) block.attention.latent = LatentAttention{12, 8, 8, 4, 8};
  else if (deepseek) block.attention.latent = LatentAttention{size.hidden >= 5120 ? 1536 : 0, 512, 128, 64, 128};
  block.mlp.ffn = size.ffn;
  spec.blocks.assign(static_cast<size_t>(size.layers), block);
  MoeSpec moe;
  moe.experts = size.experts;
  moe.top_k = size.top_k;
  moe.expert_ffn = size.expert_ffn;
  moe.shared_ffn = size.shared_ffn;
  moe.normalize_top_k = spec.family != "deepseek_v2";
  moe.correction_bias = spec.family == "deepseek_v3";
  for (size_t layer = static_cast<size_t>(size.dense_layers); layer < spec.blocks.size(); ++layer) spec.blocks[layer].moe = moe;
  return spec;
}

}  // namespace

ModelSpec preset(const std::string& name) {
  for (const Size& size : kSizes)
    if (name == size.name) return make(size);
  for (const ExpertSize& size : kExpertSizes)
    if (name == size.name) return make(size);
  const std::vector<std::string> names = nearest(name, preset_names(), 3);
  throw ConfigError("model \"" + name + "\" is not a preset; nearest: " + names[0] + ", " + names[1] + ", " + names[2]);
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const Size& size : kSizes) names.emplace_back(size.name);
  for (const ExpertSize& size : kExpertSizes) names.emplace_back(size.name);
  return names;
}

}  // namespace weft::model
