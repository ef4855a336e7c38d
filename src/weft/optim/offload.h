// The state of an elementwise optimizer in a file.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "weft/optim/elementwise.h"
#include "weft/optim/offload_options.h"
#include "weft/optim/state_file.h"

namespace weft::optim {

/// The states of one optimizer in a file. Owners are the parameters of all groups, in order.
class OffloadedStates {
 public:
  using States = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

  OffloadedStates(const ElementwiseOptimizer& optimizer, const std::vector<OptimizerParamGroup>& groups, const OffloadOptions& options,
                  const memory::FileCalls& calls);

  /// One update of every parameter that has a gradient. ConfigError when the groups or what the optimizer keeps have changed.
  void update(const ElementwiseOptimizer& optimizer, const std::vector<OptimizerParamGroup>& groups, States& states);
  /// Moves states that were loaded into the file.
  void take(States& states);
  OffloadUse use() const;

 private:
  struct Entry {
    at::Tensor parameter;
    std::vector<StateSpec> specs;
    size_t group = 0;
  };

  void check_unchanged(const ElementwiseOptimizer& optimizer, const std::vector<OptimizerParamGroup>& groups) const;
  NamedState& state_of(size_t owner, States& states);
  std::map<std::string, at::Tensor> pages(size_t owner);

  std::vector<Entry> entries_;
  std::shared_ptr<StateFile> file_;
  int64_t touched_ = 0, steps_ = 0;
  double step_s_ = 0;
};

}  // namespace weft::optim
