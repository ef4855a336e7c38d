// What follows from a configuration, the data it names and the ranks: everything that is known before a model exists.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>

#include "weft/comm/world.h"
#include "weft/config/check.h"
#include "weft/config/run_config.h"
#include "weft/data/batches.h"
#include "weft/model/spec.h"
#include "weft/nn/tensor_axis.h"

namespace weft::train {

struct Job {
  config::RunConfig config;  ///< as used: what was 0 for "derive it" has its value
  model::ModelSpec spec;
  config::Accumulation accumulation;
  at::ScalarType dtype;   ///< of weights and activations
  std::string tokenizer;  ///< id from the data; empty when the files do not say it
  data::TokenSamples train;
  std::optional<data::TokenSamples> val;

  int64_t tokens_per_step() const { return config.train.global_batch * config.data.seq; }
};

/// Opens the data and checks everything against everything. ConfigError with all findings of a stage.
Job make_job(const config::RunConfig& config, int64_t ranks);

/// The dtype that a name of the configuration means: fp64, fp32, bf16 or fp16.
at::ScalarType scalar_type(const std::string& name);

/// Of kept gradients: train.gradient_dtype, and what its auto means.
at::ScalarType gradient_type(const Job& job);

/// Back end and deadline as configured, for World::init.
WorldOptions world_options(const config::RunConfig& config);

/// The ranks' axes, pipeline outside, data parallelism next and tensor parallelism inside. Collective.
struct Axes {
  Comm world, dp, pp;
  nn::TensorAxis tp;
  std::string text;  ///< Mesh::describe(), empty for data parallelism alone

  /// Whether this rank's loss counts where losses of all ranks are added up: pipeline and tensor-parallel ranks have the same.
  bool counts_loss() const { return tp.rank() == 0 && pp.rank() == 0; }
};
Axes make_axes(const Job& job, const World& world);

/// This rank's part of every global batch; `comm`: the data-parallel ranks.
data::TrainBatches train_batches(const Job& job, const Comm& comm);

/// What `weft train --dry-run` prints: sizes, derived accumulation, memory per rank.
std::string describe(const Job& job);
/// The same as a JSON object.
std::string describe_json(const Job& job);

/// Threads of a rank: train.threads, or if that is 0 its share of the cores, but no more than its matrix products can feed (idle
/// threads of a small model cost a hundred times the speed when the machine is shared).
int rank_threads(const Job& job, int64_t cores, int64_t local_ranks);

}  // namespace weft::train
