// Scratch that CPU kernels take from the allocator, for programs that are counted on the meta device.
#pragma once

#include <cstdint>

namespace weft::memory {

/// While it lives, operations on meta tensors of this thread are booked with what the same operations on CPU tensors hold while they run:
/// - products in bf16 and fp16: oneDNN packs operands (matmul's scratchpad). The library itself is asked how much, once for every
///   product of one shape and number of threads; nothing is computed.
/// - sums and products of two dtypes, such as a bf16 gradient that is added to an fp32 buffer: the operand is cast first (TensorIterator).
/// Counts go where install_meta_counter() counts.
class KernelScratch {
 public:
  KernelScratch();
  ~KernelScratch();
  KernelScratch(const KernelScratch&) = delete;
  KernelScratch& operator=(const KernelScratch&) = delete;

 private:
  uint64_t handle_;
};

}  // namespace weft::memory
