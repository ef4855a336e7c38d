// What a kernel asks libtorch's CPU allocator for, found out by calling it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace weft::memory {

/// Bytes of the first block that `call` asks for on this thread, which it does not get: the call ends there, before it has computed
/// anything. 0 when it ran to its end without asking.
int64_t first_request(const std::function<void()>& call);

/// The most bytes that `call` held at a time, from blocks that it asked for on this thread; it runs to its end.
int64_t peak_of_requests(const std::function<void()>& call);

/// A tensor whose memory the system provides when it is touched: zeros until then. For the operands of probes.
at::Tensor untouched(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

}  // namespace weft::memory
