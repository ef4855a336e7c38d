// Buffers for full gradients that exist only between the first gradient of a group and the end of its reduce-scatter.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "weft/comm/comm.h"
#include "weft/layout/place.h"

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

  /// Buffers on `device`, in memory that `comm` reads in place; the largest are as large as what take() will ask for. Collective.
  /// make_room: gets a buffer back from a group that has launched its reduction; false if there is none, or if
  /// waiting for it would not end.
  GradientPool(const std::vector<layout::BufferClass>& classes, at::Device device, const Comm& comm, std::function<bool()> make_room);

  /// A tensor [numel] of `dtype`, uninitialised, from the smallest class that holds it (from another, and who finds which taken
  /// would depend on timing); `buffer` is set to its owner, which whoever took it gives back by clearing `taken`.
  /// When peers still read all free buffers it waits for them, so that what a rank holds does not depend on how far its peers
  /// are. `buffer` is null, and the tensor private memory, which is reduced with a copy more, when gradients that are not
  /// reduced yet fill the pool, or when a peer needs this rank first (Work::wait_unless_needed): ranks that take different
  /// branches reduce in the same order but not at the same moments of their program.
  at::Tensor take(int64_t numel, at::ScalarType dtype, Buffer*& buffer);

 private:
  using Buffers = std::vector<std::unique_ptr<Buffer>>;

  Buffer* find(const Buffers& buffers);

  at::Device device_;
  std::vector<Buffers> classes_;  // ascending sizes
  std::function<bool()> make_room_;
  uint64_t turns_ = 0;
};

}  // namespace weft::parallel
