// Buffers for full gradients that exist only between the first gradient of a group and the end of its reduce-scatter.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "weft/comm/comm.h"

namespace weft::parallel {

class GradientPool {
 public:
  /// A buffer of the pool.
  struct Buffer {
    at::Tensor bytes;
    Work last;           ///< the reduction that reads it
    bool taken = false;  ///< a group writes into it
    uint64_t turn = 0;   ///< counts what was taken
  };

  /// `count` buffers of `bytes` each, the largest that take() will ask for, on `device`, in memory that `comm` reads in place.
  /// Collective. make_room: gets a buffer back from a group that has launched its reduction; false if there is none, or if
  /// waiting for it would not end.
  GradientPool(int count, int64_t bytes, at::Device device, const Comm& comm, std::function<bool()> make_room);

  /// A tensor [numel] of `dtype`, uninitialised; `buffer` is set to its owner, which whoever took it gives back by clearing `taken`.
  /// When peers still read all free buffers it waits for them, so that what a rank holds does not depend on how far its peers
  /// are. `buffer` is null, and the tensor private memory, which is reduced with a copy more, when gradients that are not
  /// reduced yet fill the pool, or when a peer needs this rank first (Work::wait_unless_needed): ranks that take different
  /// branches reduce in the same order but not at the same moments of their program.
  at::Tensor take(int64_t numel, at::ScalarType dtype, Buffer*& buffer);

 private:
  Buffer* find();

  at::Device device_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::function<bool()> make_room_;
  uint64_t turns_ = 0;
};

}  // namespace weft::parallel
