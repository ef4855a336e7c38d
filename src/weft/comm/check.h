// Argument checks of Comm's calls. All throw ConfigError with the operation, the value and the rule.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "weft/comm/op.h"
#include "weft/comm/state.h"

namespace weft::detail {

/// Defined, dense, contiguous, and on a device that the back end reaches.
void check_tensor(const CommState& comm, CommOp op, const at::Tensor& tensor, const char* role);
/// Both sides have one dtype and device, and out has `out_parts` times, in `in_parts` times the same number of elements.
void check_pair(const CommState& comm, CommOp op, const at::Tensor& out, const at::Tensor& in, int64_t out_parts,
                int64_t in_parts);
/// A rank of the group; for messages not this one.
void check_rank(const CommState& comm, CommOp op, int rank, const char* role);
/// One row count per rank, none negative, their sum size(0).
void check_rows(const CommState& comm, const at::Tensor& tensor, const std::vector<int64_t>& rows, const char* role);
/// all_to_all: one dtype, one device, rows of one size.
void check_row_sizes(const CommState& comm, const at::Tensor& out, const at::Tensor& in);
/// Reductions are defined for real floating-point and integer tensors, and all but avg for bool.
void check_reducible(const CommState& comm, CommOp op, const at::Tensor& tensor, ReduceOp reduce);

}  // namespace weft::detail
