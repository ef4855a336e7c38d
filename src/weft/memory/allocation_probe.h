// What a kernel asks libtorch's CPU allocator for, found out by calling it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace weft::memory {

/// Bytes of the first block that `call` asks for on this thread, which it does not get: the call ends there, before it has computed
/// anything. 0 when it ran to its end without asking.
int64_t first_request(const std::function<void()>& call);

/// Of blocks that were asked for on this thread.
struct RequestCount {
  int64_t live = 0;   ///< bytes now
  int64_t peak = 0;   ///< highest `live`
  int64_t total = 0;  ///< bytes of all blocks so far
  int64_t blocks = 0;
};

/// Counts this thread's requests for memory of one kind of device, the CPU or meta, while it lives; blocks from before are not
/// counted. One at a time in a process.
class RequestCounter {
 public:
  explicit RequestCounter(c10::DeviceType device = c10::kCPU);
  ~RequestCounter();
  RequestCounter(const RequestCounter&) = delete;
  RequestCounter& operator=(const RequestCounter&) = delete;
  RequestCount now() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A tensor whose memory the system provides when it is touched: zeros until then. For the operands of probes.
at::Tensor untouched(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

}  // namespace weft::memory
