#include "weft/parallel/gradient_pool.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "weft/memory/account.h"
#include "weft/parallel/flat_view.h"

namespace weft::parallel {

GradientPool::GradientPool(const std::vector<layout::BufferClass>& classes, at::Device device, const Comm& comm, std::function<bool()> make_room)
    : device_(device), make_room_(std::move(make_room)) {
  const memory::Scope scope(memory::Category::gradients);
  for (auto c = classes.rbegin(); c != classes.rend(); ++c) {
    Buffers& buffers = classes_.emplace_back();
    for (int i = 0; i < c->count; ++i) {
      buffers.push_back(std::make_unique<Buffer>(Buffer{.bytes = comm.allocate({c->bytes}, at::TensorOptions(at::kByte).device(device)), .last = {}}));
    }
  }
}

GradientPool::Buffer* GradientPool::find(const Buffers& buffers) {
  for (;;) {
    Buffer* oldest = nullptr;
    for (const auto& candidate : buffers) {
      if (candidate->taken) continue;
      if (candidate->last.test()) return candidate.get();
      if (oldest == nullptr || candidate->turn < oldest->turn) oldest = candidate.get();
    }
    if (oldest != nullptr) return oldest->last.wait_unless_needed() ? oldest : nullptr;
    if (!make_room_()) return nullptr;
  }
}

at::Tensor GradientPool::take(int64_t numel, at::ScalarType dtype, Buffer*& buffer) {
  const auto bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  const auto fits = [&](const Buffers& buffers) { return buffers.front()->bytes.numel() >= bytes; };
  const auto smallest = std::find_if(classes_.begin(), classes_.end(), fits);
  buffer = smallest == classes_.end() ? nullptr : find(*smallest);
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
