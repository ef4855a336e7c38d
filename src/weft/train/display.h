// Progress of a run for people.
#pragma once

#include <cstdint>
#include <deque>

#include "weft/core/progress.h"
#include "weft/train/metrics.h"

namespace weft::train {

/// Shows every step on one line; steps with a validation loss leave a line of their own.
class StepDisplay {
 public:
  explicit StepDisplay(int64_t total_steps) : total_(total_steps) {}
  void show(const StepRecord& record);

 private:
  ProgressLine line_;
  int64_t total_;
  std::deque<double> recent_s_;  ///< seconds of the latest steps, for a steady speed and time left
};

}  // namespace weft::train
