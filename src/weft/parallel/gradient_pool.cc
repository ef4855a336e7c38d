#include "weft/parallel/gradient_pool.h"

#include <ATen/ops/empty.h>

#include "weft/memory/account.h"
#include "weft/parallel/flat_view.h"

namespace weft::parallel {

GradientPool::GradientPool(int count, int64_t bytes, at::Device device, const Comm& comm, std::function<bool()> make_room)
    : device_(device), make_room_(std::move(make_room)) {
  const memory::Scope scope(memory::Category::gradients);
  for (int i = 0; i < count && bytes > 0; ++i) {
    buffers_.push_back(std::make_unique<Buffer>(Buffer{.bytes = comm.allocate({bytes}, at::TensorOptions(at::kByte).device(device)), .last = {}}));
  }
}

GradientPool::Buffer* GradientPool::find() {
  while (!buffers_.empty()) {
    Buffer* oldest = nullptr;
    for (const auto& candidate : buffers_) {
      if (candidate->taken) continue;
      if (candidate->last.test()) return candidate.get();
      if (oldest == nullptr || candidate->turn < oldest->turn) oldest = candidate.get();
    }
    if (oldest != nullptr) return oldest->last.wait_unless_needed() ? oldest : nullptr;
    if (!make_room_()) return nullptr;
  }
  return nullptr;
}

at::Tensor GradientPool::take(int64_t numel, at::ScalarType dtype, Buffer*& buffer) {
  buffer = find();
  if (buffer == nullptr) {
    const memory::Scope scope(memory::Category::gradients);
    return at::empty({numel}, at::TensorOptions(dtype).device(device_));
  }
  buffer->last.released();  // all peers have started that reduction: they finish reading without this rank's help
  buffer->taken = true;
  buffer->turn = ++turns_;
  return alias_of(buffer->bytes, 0, numel, dtype);
}

}  // namespace weft::parallel
