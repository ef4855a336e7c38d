// Which part of a whole parameter a rank of a tensor-parallel group holds, kept beside the parameter.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "weft/comm/comm.h"
#include "weft/nn/start_values.h"

namespace weft::nn {

/// The tensor-parallel ranks hold parts of dim `dim` in rank order; `copies` neighbours hold the same part. Gradients are
/// complete on every rank when backward ends: those of weights that several ranks hold were summed on the way (autograd::copy_to),
/// so that copies have equal values and gradients throughout.
struct TensorPlacement {
  Comm comm;
  std::vector<int64_t> shape;  ///< of the whole parameter
  int dim = -1;                ///< -1: every rank holds all of it
  int64_t begin = 0;           ///< of this rank's part
  int64_t copies = 1;          ///< comm.size() when dim is -1

  /// Whether this rank's copy is the one to count, in norms and files.
  bool counts() const { return comm.rank() % copies == 0; }
};

/// Attaches it to a parameter, which keeps it when its memory changes (set_data, to(), DataParallel, weft::materialise); clones and results
/// of operators have none. Shards of a parameter (DataParallel::shards()) have its placement.
void set_placement(const at::Tensor& parameter, TensorPlacement placement);
/// Null for parameters of no tensor-parallel group.
std::shared_ptr<const TensorPlacement> placement_of(const at::Tensor& parameter);

/// The whole parameter, or a tensor of its local shape that belongs to it (a gradient), from all ranks of its placement: a new
/// tensor, the same on all. A clone when `placement` is null. Collective over placement->comm.
at::Tensor whole_tensor(const at::Tensor& local, const std::shared_ptr<const TensorPlacement>& placement);

/// Largest relative difference between copies that must be equal, over all ranks of the placement: max |a - first| / max |first|, infinite
/// for NaN. 0 when `placement` is null. Collective over placement->comm.
double copy_difference(const at::Tensor& local, const std::shared_ptr<const TensorPlacement>& placement);

/// Start values of elements part.begin .. of dim `dim` (size `size`) out of a tensor of shape `shape` that `whole` makes.
std::shared_ptr<const StartValues> values_of_part(std::shared_ptr<const StartValues> whole, std::vector<int64_t> shape, int dim,
                                                  int64_t begin, int64_t size);

}  // namespace weft::nn
