#include "weft/parallel/gradient_pool.h"

#include <ATen/ops/empty.h>

#include "weft/memory/account.h"
#include "weft/parallel/flat_view.h"

namespace weft::parallel {

GradientPool::GradientPool(int count, int64_t bytes, at::Device device, const Comm& comm) : device_(device) {
  const memory::Scope scope(memory::Category::gradients);
  for (int i = 0; i < count && bytes > 0; ++i) {
    buffers_.push_back(std::make_unique<Buffer>(Buffer{.bytes = comm.allocate({bytes}, at::TensorOptions(at::kByte).device(device)), .last = {}}));
  }
}

at::Tensor GradientPool::take(int64_t numel, at::ScalarType dtype, Buffer*& buffer) {
  const auto bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  for (const auto& candidate : buffers_) {
    // test(): all peers have started that reduction, so that they finish reading without this rank's help.
    if (candidate->taken || candidate->bytes.numel() < bytes || !candidate->last.test()) continue;
    candidate->last.released();
    candidate->taken = true;
    buffer = candidate.get();
    return alias_of(candidate->bytes, 0, numel, dtype);
  }
  buffer = nullptr;
  const memory::Scope scope(memory::Category::gradients);
  return at::empty({numel}, at::TensorOptions(dtype).device(device_));
}

}  // namespace weft::parallel
