// What a few training steps under some layout show, as whole tensors: for comparing layouts.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "weft/parallel/data_parallel.h"

namespace weft::train {

/// How far apart ranks are that must hold the same values of a tensor.
struct CopyDifference {
  std::string name;
  const char* axis;  ///< "tensor-parallel", "data-parallel" or "pipeline"
  double difference = 0;  ///< largest of all ranks: max |a - first| / max |first|, infinite for NaN
};

struct TrainingTrace {
  std::vector<double> losses, norms;                     ///< of each step; norms before clipping
  std::vector<NamedTensor> starts, gradients, weights;   ///< fp64; gradients of the first step, before clipping
  std::vector<CopyDifference> start_copies, copies;      ///< of the weights before the first and after the last step
  double norm_spread = 0;                                ///< largest relative difference of a step's norm between ranks
};

/// Records one rank's run. Every call is collective over `world`; only ranks with `keep` hold tensors.
class TraceRecorder {
 public:
  /// Records the start values. module: what `dp` wraps; both outlive this.
  TraceRecorder(const torch::nn::Module& module, DataParallel& dp, Comm world, bool keep);
  /// After backward and clipping to `clip` (0: none), before the update. loss: of the global batch.
  void step(double loss, double norm, double clip);
  /// After the last update.
  TrainingTrace finish();

 private:
  std::vector<NamedTensor> weights();
  std::vector<CopyDifference> copies();

  const torch::nn::Module& module_;
  DataParallel& dp_;
  Comm world_;
  bool keep_;
  TrainingTrace trace_;
};

}  // namespace weft::train
