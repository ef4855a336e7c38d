// Checks at construction: what is wrapped, and that all ranks wrapped the same.
#pragma once

#include <vector>

#include "weft/parallel/data_parallel.h"

namespace weft::parallel {

/// Throws the same ConfigError on every rank if a rank has tensors that cannot be wrapped (undefined, sparse, not a leaf, two
/// of one name, two that share memory) or options that cannot be had (every finding is named), or if options that the ranks
/// must share, or names, order, shapes, dtypes or trainability differ between the ranks (the first difference is named).
/// Collective.
void check_same_model(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers,
                      const DataParallelOptions& options, const Comm& comm);

}  // namespace weft::parallel
