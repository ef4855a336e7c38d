// Checks at construction that all ranks wrapped the same model.
#pragma once

#include <vector>

#include "weft/parallel/data_parallel.h"

namespace weft::parallel {

/// Throws the same ConfigError on every rank if names, order, shapes, dtypes or trainability differ between the ranks,
/// naming the first difference. Collective.
void check_same_model(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers, const Comm& comm);

}  // namespace weft::parallel
