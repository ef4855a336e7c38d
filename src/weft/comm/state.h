// What stands behind the handles Comm and Work. Internal to comm/.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <array>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/comm/comm.h"
#include "weft/comm/flight_log.h"
#include "weft/comm/op.h"
#include "weft/comm/transport.h"
#include "weft/core/error.h"

namespace weft::local {
class LocalGroup;
struct Op;
}

namespace weft::detail {

/// What all groups of one rank of a world share.
struct WorldCore {
  explicit WorldCore(int world_rank) : rank(world_rank), log(world_rank) {}

  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  int node = 0;
  std::chrono::milliseconds timeout{0};
  int debug_level = 0;                   // WEFT_DEBUG when the world was made
  std::map<std::string, int> groups;     // how many groups had this name and these ranks: makes their keys unique
  std::shared_ptr<Transport> transport;  // null: alone
  FlightLog log;
};

/// One call as errors and the log name it.
struct Call {
  CommOp op = CommOp::barrier;
  uint64_t sequence = 0;
  uint64_t ticket = 0;  // in the flight log
  std::chrono::steady_clock::time_point start;
};

/// A call in flight: the back end's work, and what remains to be done when that is complete.
struct Flight {
  Call call;
  std::shared_ptr<local::Op> op{};          // of the local back end, instead of `work`
  c10::intrusive_ptr<c10d::Work> work{};
  std::function<void()> finish;     // for instance: round the fp32 sum to the caller's bf16 tensor
  std::vector<at::Tensor> tensors;  // stay alive until the end
};

/// What the copies of one group (with_timeout) share. Used by the rank's thread only, but for `progress`.
struct GroupRecord {
  ~GroupRecord();  // never waits for peers: calls in flight are aborted

  c10::intrusive_ptr<c10d::Backend> backend;  // null: rehearsal
  bool local = false;
  std::shared_ptr<Progress> progress;
  uint64_t messages = 0;  // sends and receives so far
  int log_group = 0;
  std::array<TrafficCount, kCommOps> traffic;
  std::optional<CommFailure> failure;  // the group is unusable after it
  std::deque<Flight> dropped;          // calls whose Work the caller dropped before its end
};

class CommState {
 public:
  int size() const { return static_cast<int>(world_ranks.size()); }

  std::shared_ptr<WorldCore> core;                // null: alone, and not part of any world
  c10::intrusive_ptr<c10d::Backend> backend;      // null: size 1, or a rehearsal
  local::LocalGroup* local = nullptr;             // `backend`, when it is the local one
  bool gloo = false;                              // `backend` is gloo, whose gaps comm/wire.h closes
  std::vector<int> world_ranks{0};
  int rank = 0;
  std::string name = "self";
  std::chrono::milliseconds timeout{0};
  std::shared_ptr<GroupRecord> record;            // null: size 1
};

/// Makes the state of a group; collective over its members, which pass the same arguments.
std::shared_ptr<CommState> make_group(const std::shared_ptr<WorldCore>& core, const std::vector<int>& world_ranks,
                                      const std::string& name, std::chrono::milliseconds timeout);

/// Logs that `call` failed, writes the flight log at the group's first failure, and poisons the group.
void note_failure(CommState& comm, const Call& call, const CommFailure& failure);

/// Throws the group's or the world's failure, if any, as a CommError about `call`.
void throw_if_failed(CommState& comm, const Call& call);

/// Turns a back end's error or an expired deadline into a CommError that names who is at fault, and poisons the group.
[[noreturn]] void fail(CommState& comm, const Call& call, const std::string& symptom);

/// Waits for a back end's work; errors as CommError that names who is at fault.
void wait_backend(CommState& comm, const Call& call, const c10::intrusive_ptr<c10d::Work>& work);

/// The deadline that other back ends than ours get: theirs would say nothing about who is at fault, so ours comes first.
inline constexpr std::chrono::milliseconds kBackgroundTimeout = std::chrono::hours(24);

/// Ends the calls whose Work was dropped, as far as they are complete.
void finish_dropped(CommState& comm);

class WorkState {
 public:
  WorkState(std::shared_ptr<CommState> comm, Flight flight) : comm_(std::move(comm)), flight_(std::move(flight)) {}
  ~WorkState();
  WorkState(const WorkState&) = delete;
  WorkState& operator=(const WorkState&) = delete;

  bool test();
  void wait();
  void released();
  bool wait_unless_needed();

 private:
  enum class Way { poll, wait, wait_unless_needed };
  bool run_local(Way way, bool release);
  void complete();

  std::shared_ptr<CommState> comm_;
  Flight flight_;
  bool done_ = false;
  bool released_ = false;
};

}  // namespace weft::detail
