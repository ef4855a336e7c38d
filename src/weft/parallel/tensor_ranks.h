// What a data-parallel engine has to know of the tensor-parallel ranks, each of which holds a part of every layer.
#pragma once

#include <vector>

#include "weft/parallel/agreement.h"
#include "weft/parallel/data_parallel.h"

namespace weft::parallel {

struct TensorRanks {
  Comm comm;                  ///< size 1 without tensor parallelism
  std::vector<bool> counted;  ///< by parameter: whether this rank's copy is the one that norms count
};

/// From the placements of `parameters` (nn/placement.h). Those without one are taken to be the same on all tensor-parallel ranks.
/// ConfigError, with two names, when they belong to different groups.
TensorRanks tensor_ranks_of(const std::vector<NamedTensor>& parameters);

/// A step counts on all ranks that share a model out or on none of them. `good`: what this rank's data-parallel ranks found. Where a
/// rank of `comm` found a fault and this one none, `fault` becomes a message that names it. Collective over `comm`.
bool agree_on_step(bool good, StepFault& fault, const Comm& comm);

}  // namespace weft::parallel
