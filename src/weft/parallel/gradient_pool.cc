#include "weft/parallel/gradient_pool.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "weft/memory/account.h"

namespace weft::parallel {

GradientPool::GradientPool(int count, int64_t bytes, const Comm& comm) {
  const memory::Scope scope(memory::Category::gradients);
  for (int i = 0; i < count && bytes > 0; ++i) {
    buffers_.push_back(std::make_unique<Buffer>(Buffer{.bytes = comm.allocate({bytes}, at::kByte), .last = {}}));
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
    return at::from_blob(candidate->bytes.mutable_data_ptr(), {numel}, [keep = candidate->bytes](void*) {},
                         at::TensorOptions().dtype(dtype));
  }
  buffer = nullptr;
  const memory::Scope scope(memory::Category::gradients);
  return at::empty({numel}, at::TensorOptions().dtype(dtype));
}

}  // namespace weft::parallel
