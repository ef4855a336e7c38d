// The schedules that a pipeline runs, checked against its stages.
#pragma once

#include <map>
#include <utility>

#include "weft/parallel/pipeline/pipeline.h"

namespace weft::parallel {

class PipelinePlan {
 public:
  PipelinePlan(schedule::Maker make, const Stages& stages, int ranks, int whole_stages);

  struct Made {
    schedule::Schedule schedule;
    int64_t fingerprint = 0;  ///< of its actions
  };
  const Made& of(int micro_batches, bool forward_only);
  /// Whether it has I and W.
  bool splits() const { return splits_; }

 private:
  schedule::Schedule training(int micro_batches) const;

  schedule::Maker make_;
  std::vector<int> owner_;
  int ranks_, chunks_, whole_stages_;
  bool splits_ = false;
  std::map<std::pair<int, bool>, Made> made_;
};

/// ConfigError for the first module of `stages` with a weight matrix whose gradient cannot be put off.
void require_split_backward(const Stages& stages);

}  // namespace weft::parallel
