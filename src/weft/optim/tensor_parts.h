// Where the elements that an optimizer holds lie in the whole parameter, of which tensor-parallel ranks may hold parts.
#pragma once

#include <torch/optim/optimizer.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "weft/nn/placement.h"

namespace weft::optim {

/// A parameter as [product of the other dims, last dim]; this rank's elements are some of one tensor-parallel rank's part of it.
struct TensorPart {
  std::vector<int64_t> shape;               ///< of the whole parameter
  int64_t row = 0, column = 0;              ///< of the part's first element
  int64_t columns = 1, part_columns = 1;    ///< of the parameter, of the part
  int64_t begin = 0;                        ///< of this rank's first element in the part
  std::shared_ptr<const nn::TensorPlacement> placement;  ///< null without tensor parallelism

  int64_t numel() const;
  /// Whether this rank has less than the parameter because of tensor parallelism.
  bool cut() const { return placement && placement->dim >= 0 && placement->comm.size() > 1; }
  /// Calls fn(row, column, offset, length), row and column in the whole parameter, for each stretch of a row among this rank's elements at ..
  /// at + n - 1, `offset` from `at`.
  template <class Fn>
  void for_rows(int64_t at, int64_t n, const Fn& fn) const {
    for (int64_t i = 0; i < n;) {
      const int64_t place = begin + at + i, within = place % part_columns, length = std::min(part_columns - within, n - i);
      fn(row + place / part_columns, column + within, i, length);
      i += length;
    }
  }
};

/// Of what an optimizer holds: a parameter, or a shard of one. ConfigError for a parameter that is cut in a middle dim.
TensorPart tensor_part(const at::Tensor& parameter);

/// The tensor-parallel ranks of the parameters; one rank without. ConfigError, with `optimizer`, for several groups.
Comm tensor_ranks(const std::vector<TensorPart>& parts, const char* optimizer);

}  // namespace weft::optim
