// What follows from a configuration, and rules between keys.
#pragma once

#include <string>
#include <vector>

#include "weft/config/run_config.h"
#include "weft/core/error.h"
#include "weft/model/spec.h"

namespace weft::config {

/// Rules between keys that need neither data nor ranks.
void check(const RunConfig& config, Findings& findings);

/// Whether the state of this optimizer can be kept elsewhere between the steps: it treats elements, or blocks of them, alike.
bool can_offload(const std::string& optimizer);

/// The model that the configuration names; `data_vocab` is the training data's vocabulary (0 = unknown). ConfigError
/// with all findings when sizes are missing or do not fit each other.
model::ModelSpec model_spec(const RunConfig& config, int64_t data_vocab);

/// schedule.decay: as configured, or what -1 stands for.
int64_t decay_steps(const RunConfig& config);

/// optimizer.rates: patterns of names (core/pattern.h) and the share of the learning rate. Problems become findings.
struct RateRule {
  std::string names;
  double share = 1;
};
std::vector<RateRule> rate_rules(const OptimizerConfig& optimizer, Findings& findings);

/// optimizer.momentum, or what its -1 means.
double momentum(const OptimizerConfig& optimizer);

/// Steps of warm-up: as configured, or what -1 stands for.
int64_t warmup_steps(const RunConfig& config);

/// parallel.chunks: as configured, or the schedule's own number; 1 without pipeline parallelism.
int64_t pipeline_chunks(const RunConfig& config);

/// How a global batch is worked off.
struct Accumulation {
  int64_t dp = 1;
  int64_t per_rank = 1;     ///< samples of one rank per step
  int64_t micro_batch = 1;  ///< most samples of one forward pass
  int64_t steps = 1;        ///< forward and backward passes per step; the last may be smaller
};

/// Findings: layout.dp against the number of ranks, parallel.dp_shard and reshard_group that do not divide it, train.global_batch not a multiple
/// of dp (legal values named).
Accumulation accumulation(const RunConfig& config, int64_t ranks, Findings& findings);

}  // namespace weft::config
