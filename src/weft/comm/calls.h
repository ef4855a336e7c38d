// What every call of a Comm does around the back end's: checks for earlier failures, log, counts, cross-check, errors.
#pragma once

#include "weft/comm/local/op.h"
#include "weft/comm/state.h"

namespace weft::detail {

/// What a call is about, for the log, the counts and the cross-check.
struct Subject {
  CommOp op;
  const at::Tensor* tensor = nullptr;
  int peer = -1;          ///< root or partner
  int64_t bytes = 0;      ///< TrafficCount::bytes
  int64_t sent = 0;       ///< TrafficCount::sent
  ReduceOp reduce = ReduceOp::sum;
};

/// Numbers and logs the call. CommError when the group or the world has failed.
Call begin(CommState& comm, const Subject& subject);

/// Logs that a call which moves nothing is done.
Work finished(const CommState& comm, const Call& call);

/// Hands an error of the back end on, as a CommError that names who is at fault.
[[noreturn]] void rethrow_as_comm_error(CommState& comm, const Call& call);

/// Runs `call_backend` and hands its work out. `finish` brings the result into the caller's tensors.
template <class F>
Work launch(const std::shared_ptr<CommState>& comm, const Call& call, std::vector<at::Tensor> tensors, F&& call_backend,
            std::function<void()> finish = {}) {
  Flight flight{.call = call, .finish = std::move(finish), .tensors = std::move(tensors)};
  try {
    flight.work = call_backend();
  } catch (...) {
    rethrow_as_comm_error(*comm, call);
  }
  return Work(std::make_shared<WorkState>(comm, std::move(flight)));
}

/// The same for the local back end: `start` returns the engine's call, which keeps its tensors alive.
template <class F>
Work launch_local(const std::shared_ptr<CommState>& comm, const Call& call, F&& start) {
  Flight flight{.call = call};
  try {
    flight.op = start();
  } catch (...) {
    rethrow_as_comm_error(*comm, call);
  }
  if (flight.op->released) return finished(*comm, call);  // all peers had come before: no handle is needed
  return Work(std::make_shared<WorkState>(comm, std::move(flight)));
}

}  // namespace weft::detail
