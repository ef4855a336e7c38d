// Small models of every family that tensor parallelism cuts differently, and a training run that `train::verify` repeats.
#pragma once

#include <string>
#include <vector>

#include "tests/support/command.h"
#include "tests/support/test_pch.h"
#include "weft/data/token_file.h"
#include "weft/train/verify.h"

namespace weft::testing {

struct VerifyModel {
  const char* name;
  const char* preset;
  int64_t hidden = 0, heads = 0, kv_heads = 0, head_dim = 0, ffn = 0;
  double dropout = 0;
};

/// Sizes that nothing divides where that is legal; 67 ids.
inline const std::vector<VerifyModel> kVerifyModels{
    {"gpt2", "gpt2-tiny", 32, 4, 4, 8, 90, 0.1},                // tied head, biases, learned positions, LayerNorm
    {"llama", "llama-tiny"},                                    // 2 key heads, head of its own
    {"llama_tied", "llama-tiny-tied", 32, 4, 4, 8, 50, 0.2},
    {"qwen2", "qwen2.5-0.5b", 24, 6, 3, 4, 41},                 // biases of queries, keys and values; 3 key heads
    {"qwen3", "qwen3-0.6b", 24, 8, 2, 4, 40},                   // norms of queries and keys; head_dim is not hidden / heads
    {"gemma2", "gemma2-2b", 32, 4, 2, 8, 33, 0.1},              // soft caps, so no fused loss; four norms, embedding scale
};

/// Ids of which each follows from the one before, most of the time.
inline void write_verify_tokens(const std::string& path) {
  data::TokenWriter writer(path, 67, "bytes");
  std::vector<uint32_t> tokens;
  for (uint32_t i = 0; i < 1500; ++i) tokens.push_back((i * 5 + i / 11) % 67);
  writer.append(tokens);
  writer.finish();
}

inline config::RunConfig verify_config(const VerifyModel& model, const std::string& tokens) {
  config::RunConfig c;
  c.model.preset = model.preset;
  c.model.layers = 2;
  c.model.hidden = model.hidden;
  c.model.heads = model.heads;
  c.model.kv_heads = model.kv_heads;
  c.model.head_dim = model.head_dim;
  c.model.ffn = model.ffn;
  c.model.dropout = model.dropout;
  c.model.vocab = 67;
  c.model.context = 16;
  c.model.init_std = 0.1;  // so that attention and MLP matter from the first step on
  c.data.train = tokens;
  c.data.seq = 12;
  c.train.global_batch = 8;
  c.train.steps = 10;
  c.train.dtype = "fp64";
  c.optimizer.lr = 1e-2;
  c.optimizer.clip_norm = 0.5;  // below the first norms: clipping acts
  c.layout.timeout_s = 30;
  return c;
}

/// Every layout whose numbers must be those of one rank. tp = 3 wants three key heads, or as many as query heads.
inline std::vector<std::string> verify_layouts(const VerifyModel& model) {
  std::vector<std::string> layouts{"tp=2",
                                   "tp=2,sequence_parallel=true",
                                   "tp=2,sequence_parallel=true,micro_batch=3",
                                   "dp_shard=2,zero=3,tp=2",
                                   "dp_shard=2,zero=3,tp=2,sequence_parallel=true,micro_batch=2",
                                   "dp=2,tp=2,micro_batch=2",
                                   "dp=2,zero=1,tp=2,sequence_parallel=true",
                                   "dp=2,zero=2,tp=2,micro_batch=2",
                                   "dp=4,dp_shard=2,zero=3,tp=2",
                                   "tp=2,sequence_parallel=true,train.recompute=full",
                                   "dp=2,tp=2,micro_batch=2,train.recompute=keep_attention",
                                   "dp_shard=2,zero=3,tp=2,train.recompute=full",
                                   "tp=2,tp_overlap=2",
                                   "tp=2,sequence_parallel=true,tp_overlap=3,micro_batch=3",
                                   "dp_shard=2,zero=3,tp=2,sequence_parallel=true,tp_overlap=4,train.recompute=full"};
  const std::string name = model.name;
  if (name != "qwen2") layouts.insert(layouts.end(), {"tp=4", "tp=4,sequence_parallel=true", "dp=2,zero=3,tp=4"});
  if (name == "gpt2" || name == "llama_tied" || name == "qwen2") layouts.insert(layouts.end(), {"tp=3", "tp=3,sequence_parallel=true"});
  return layouts;
}

inline void expect_verified(const VerifyModel& model, const std::vector<std::string>& layouts, const std::string& dtype = "fp64", const std::string& backend = "auto") {
  TempDir dir;
  write_verify_tokens(dir / "tokens.bin");
  config::RunConfig config = verify_config(model, dir / "tokens.bin");
  config.train.dtype = dtype;
  config.layout.backend = backend;
  const VerifyReport report = train::verify(config, layouts, {.steps = 10});
  EXPECT_EQ(report.rows.size(), layouts.size());
  EXPECT_TRUE(report.ok()) << model.name << "\n" << to_text(report);
}

}  // namespace weft::testing
