// Handle of a communication call in flight.
#pragma once

#include <memory>

namespace weft {

namespace detail {
class WorkState;
}

/// Every communication call returns a Work. It has two completions:
///   wait()     the output is valid (on CPU: the host may read it; on a device: the current stream is ordered after it);
///   released() the input may be overwritten: no peer reads it any more.
/// For tensors in private memory both come together; for buffers from Comm::allocate the peers read the input in place,
/// so that whoever writes it again (zeroing, an optimizer, a refill) first calls released().
/// A default Work is complete. Dropping a Work is allowed: the call goes on, its tensors stay alive until it ends, and a
/// failure is reported by the next call on the group. Not thread-safe; one rank's calls come from one thread at a time.
class [[nodiscard]] Work {
 public:
  Work() = default;
  explicit Work(std::shared_ptr<detail::WorkState> state) : state_(std::move(state)) {}

  /// True when the output is valid. Makes progress, never blocks. Throws CommError if the call failed.
  bool test();
  /// Returns when the output is valid. Throws CommError when a peer died, aborted, or the deadline passed.
  void wait();
  /// Returns when the output is valid and the input may be overwritten.
  void released();
  /// wait(), for a caller that has another way to go on: false, with the call still in flight, when a rank that it waits for waits
  /// for this rank in turn, so that waiting would not end. On other back ends than `local`, where nobody sees what peers wait
  /// for, it does not wait: as test().
  bool wait_unless_needed();

 private:
  std::shared_ptr<detail::WorkState> state_;
};

}  // namespace weft
