// Whole tensors out of what ranks hold parts of: for comparing layouts, and for files.
#pragma once

#include <vector>

#include "weft/parallel/data_parallel.h"

namespace weft::parallel {

/// The reduced gradients of all trainable parameters, each of the whole parameter's shape: from the shards of the data-parallel
/// ranks and the parts of the tensor-parallel ones, the same on every rank. Undefined where a parameter has none. Collective, between
/// backward and the optimizer's step.
std::vector<NamedTensor> whole_gradients(const DataParallel& dp);

}  // namespace weft::parallel
