// Options of a DataParallel: what ranks can have, and how they compare them.
#pragma once

#include <optional>
#include <string>

#include "weft/core/error.h"
#include "weft/parallel/data_parallel.h"

namespace weft::parallel {

/// What holds for one Unit.
struct UnitSettings {
  Sharding sharding;
  Reshard reshard;
  std::optional<at::ScalarType> reduce_dtype;
};
UnitSettings settings_of(const std::string& unit, const DataParallelOptions& options);

/// Elements of the parameter that are not cut apart.
int64_t granule_of(const std::string& parameter, const DataParallelOptions& options);

/// Adds what `ranks` ranks cannot have, with the legal values.
void check_options(const DataParallelOptions& options, int64_t ranks, Findings& findings);

/// One line with everything that ranks must agree on.
std::string describe(const DataParallelOptions& options);

}  // namespace weft::parallel
