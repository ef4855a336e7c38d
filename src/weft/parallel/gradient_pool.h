// Buffers for full gradients that exist only between the first gradient of a group and the end of its reduce-scatter.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "weft/comm/comm.h"

namespace weft::parallel {

class GradientPool {
 public:
  /// A buffer that is out of the pool; goes back when destroyed.
  struct Buffer {
    at::Tensor bytes;
    Work last;           ///< the reduction that reads it
    bool taken = false;
  };

  /// `count` buffers of `bytes` each on `device`, in memory that `comm` reads in place. Collective.
  GradientPool(int count, int64_t bytes, at::Device device, const Comm& comm);

  /// A tensor [numel] of `dtype`, uninitialised; `buffer` is set to its owner, or to null when all buffers of the pool are in
  /// use. It is private memory then, which is reduced with a copy more; waiting could deadlock, because peers that run
  /// behind need this rank to go on.
  at::Tensor take(int64_t numel, at::ScalarType dtype, Buffer*& buffer);

 private:
  at::Device device_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
};

}  // namespace weft::parallel
