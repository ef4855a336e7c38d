// Gradients of a pipeline's stages at the end of a step: tied parameters, and the data-parallel reduction.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "weft/parallel/data_parallel.h"
#include "weft/parallel/pipeline/stage.h"
#include "weft/schedule/action.h"

namespace weft::parallel {

/// Carries out UNSHARD, RESHARD and REDUCE. A rank reduces once, at its last REDUCE: first the gradients of tied parameters are summed over the stages
/// that hold them, then those of all parameters over the data-parallel ranks, so that copies get equal gradients (sums commute).
class StageGradients {
 public:
  /// Collective over `comm`.
  StageGradients(const Stages& stages, const Comm& comm);

  void reduce_with(DataParallel& dp);
  const DataParallel* data_parallel() const { return dp_; }
  void sync(bool on) { sync_ = on; }

  void begin_step();
  void carry_out(schedule::Kind kind, int stage, bool forward_only);

 private:
  struct Tie {
    at::Tensor parameter;  // undefined on a rank without it
    Comm ranks;            // those that hold it
    at::Tensor earlier;    // summed gradient of earlier steps, which this one adds to
  };
  std::string names_of(int stage) const;
  void sum_tied();

  const Stages* stages_;
  std::vector<Tie> ties_;
  DataParallel* dp_ = nullptr;
  bool sync_ = true;
  bool reduced_ = false;  // the last step's gradients are
  size_t waiting_ = 0;    // local stages whose REDUCE has not come in this step
  std::map<int, DataParallel::Full> gathered_;
};

}  // namespace weft::parallel
