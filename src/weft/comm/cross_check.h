// WEFT_DEBUG=2: before each collective the ranks compare what they are about to call.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "weft/comm/state.h"

namespace weft::detail {

/// One line that must be equal on all ranks: operation, dtype, shape, and `extra` (reduction, root).
std::string describe_call(CommOp op, const at::Tensor* subject, const std::string& extra);

/// Collective. Throws CommError that names the first rank whose line differs from rank 0's, with both lines.
void cross_check(CommState& comm, const Call& call, const std::string& line);

/// Collective, before an uneven all_to_all: what rank a sends to b is what b expects from a.
void cross_check_rows(CommState& comm, const Call& call, const std::vector<int64_t>& out_rows,
                      const std::vector<int64_t>& in_rows);

}  // namespace weft::detail
