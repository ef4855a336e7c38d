// The weights of a run: model.safetensors and model_ema.safetensors of its folder.
#pragma once

#include <string>
#include <vector>

#include "weft/models/transformer.h"
#include "weft/parallel/data_parallel.h"
#include "weft/train/job.h"

namespace weft::train {

/// All parameters by name, whole. Those that tensor-parallel ranks share out are gathered one by one (collective over these ranks);
/// ranks with `keep` = false let go of each at once and return nothing.
std::vector<NamedTensor> whole_weights(const torch::nn::Module& module, bool keep);

/// Writes all parameters, whole, in the model's dtype, and the tokenizer's id as metadata, to `path` of rank 0, where one Unit at a
/// time passes through memory (of pipeline stages: the whole model on rank 0). Collective over `world`; ConfigError on every rank when rank 0 cannot write.
void save_weights(DataParallel& dp, const Comm& world, const Job& job, const std::string& path);

/// A run's model and what its ids mean.
struct TrainedModel {
  models::Transformer model{nullptr};
  std::string tokenizer;
};

/// Builds the model of a run folder from its config.toml and model.safetensors, or model_ema.safetensors (`averaged`). ConfigError
/// when one is missing or they do not match.
TrainedModel load_run(const std::string& dir, bool averaged = false);

}  // namespace weft::train
