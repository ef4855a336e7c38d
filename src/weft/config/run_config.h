// Configuration of a run: one small struct per section of the TOML file. Defaults are stated here and nowhere else; the
// table in fields.cc gives each key its meaning and rule.
#pragma once

#include <cstdint>
#include <string>

namespace weft::config {

/// Sizes that are 0 come from the preset, or follow from the others by the rule that fields.cc states.
struct ModelConfig {
  std::string preset;
  std::string family = "llama";
  int64_t layers = 0, hidden = 0, heads = 0, kv_heads = 0, head_dim = 0, ffn = 0;
  int64_t vocab = 0, context = 0;
  std::string tied_head = "auto";
  double rope_theta = 0, init_std = 0;
  double dropout = 0;
};

struct DataConfig {
  std::string train, val;
  std::string format = "weft";
  int64_t seq = 256;
  bool shuffle = true;
};

struct TrainConfig {
  int64_t steps = 1000;
  int64_t global_batch = 32;
  int64_t micro_batch = 0;
  int64_t seed = 1;
  std::string dtype = "fp32";
  std::string gradient_dtype = "auto";
  std::string reduce_dtype = "auto";
  double loss_scale = 65536;
  int64_t loss_scale_interval = 2000;
  int64_t eval_every = 100;
  int64_t eval_samples = 0;
  int64_t threads = 0;
  double memory_limit_gb = 0;
  double ema = 0;
  bool ema_warmup = true;
  std::string recompute = "none";
  int64_t recompute_every = 1;
  bool offload_activations = false;
};

struct OptimizerConfig {
  std::string name = "adamw";
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  std::string moments_dtype = "auto";
  double momentum = -1;
  std::string adamw_for = "tok.*|pos.*|head.*";
  std::string rates;
  double weight_decay = 0.1;
  double clip_norm = 1.0;
};

struct ScheduleConfig {
  std::string name = "cosine";
  int64_t warmup = -1;
  double final_ratio = 0.1;
  int64_t decay = -1;
};

struct LayoutConfig {
  int64_t dp = 0;
  int64_t tp = 1;
  int64_t pp = 1;
  std::string backend = "auto";
  double bucket_mb = 25, last_bucket_mb = 1;
  int64_t timeout_s = 600;
};

struct ParallelConfig {
  int64_t zero = 0;
  int64_t dp_shard = 0;
  bool reshard_after_forward = true;
  int64_t reshard_group = 0;
  int64_t prefetch = 1;
  bool sequence_parallel = false;
  int64_t tp_overlap = 1;
  std::string schedule = "1f1b";
  int64_t chunks = 0;
};

struct OffloadConfig {
  std::string optimizer = "none";
  std::string parameters = "none";
  std::string dir;
  double buffer_mb = 16;
  int64_t buffers = 4;
};

struct OutputConfig {
  std::string dir = "runs/latest";
  bool overwrite = false;
};

struct RunConfig {
  ModelConfig model;
  DataConfig data;
  TrainConfig train;
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  LayoutConfig layout;
  ParallelConfig parallel;
  OffloadConfig offload;
  OutputConfig run;
};

}  // namespace weft::config
