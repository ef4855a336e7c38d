// The optimizer that a configuration names, over this rank's shards.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <vector>

#include "weft/config/run_config.h"
#include "weft/parallel/data_parallel.h"

namespace weft::train {

struct RunOptimizer {
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::vector<double> shares;  ///< of the learning rate, one per group (optimizer.rates)
};

/// Matrices decay, the rest does not. ConfigError for a rule of optimizer.rates that names no parameter.
RunOptimizer make_optimizer(const config::OptimizerConfig& c, const DataParallel& dp);

/// Where shards may be cut for it.
std::vector<Granule> granules_of(const config::OptimizerConfig& c);

/// Bytes of moments of one parameter: cost::moment_bytes() of what the configuration names. wide: bytes of a moment.
double moment_bytes(const config::OptimizerConfig& c, const std::string& name, const std::vector<int64_t>& shape, double wide);

}  // namespace weft::train
