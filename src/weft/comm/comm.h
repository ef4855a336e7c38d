// Comm: a set of ranks that communicate. A cheap value.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "weft/comm/work.h"

namespace c10d {
class Backend;
}

namespace weft {

/// Sums of bf16 and fp16 accumulate in fp32 and round once. `avg` is the sum divided by the number of ranks.
enum class ReduceOp { sum, avg, min, max, product };

/// What one operation moved so far, per rank.
struct TrafficCount {
  int64_t calls = 0;
  int64_t bytes = 0;  ///< size of the data: the tensor; the whole output of all_gather; the whole input of the others
  /// Bytes that a rank sends at least, by nccl-tests' factors: all_reduce 2(n-1)/n, all_gather, reduce_scatter and even
  /// all_to_all (n-1)/n, broadcast and send 1, recv 0; uneven all_to_all: the rows for others. Rounded down per call.
  int64_t sent = 0;
};

/// Where a member goes in Comm::split.
struct SplitPlace {
  int color = 0;
  int key = 0;
};

namespace detail {
class CommState;
}

/// A set of ranks that communicate. All members call the same collectives in the same order.
///
/// Every call checks shape, dtype, device and contiguity (ConfigError), has a deadline, and is written to the flight log.
/// Size 1 is the identity and costs nothing. Ranks are indices within this Comm, 0 .. size()-1; world_rank() translates.
/// Errors: CommError when a peer dies, aborts, disagrees or does not arrive in time; the group is unusable afterwards.
class Comm {
 public:
  /// The Comm of one rank.
  Comm();
  explicit Comm(std::shared_ptr<detail::CommState> state) : state_(std::move(state)) {}

  int rank() const;
  int size() const;
  const std::string& name() const;
  /// World rank of member `rank`.
  int world_rank(int rank) const;

  /// In place, any shape. The reduction order is fixed on the local back end: results are bit-equal from run to run.
  Work all_reduce(at::Tensor tensor, ReduceOp op = ReduceOp::sum) const;
  /// out [size() * n ...] flat: rank r's `in` [n ...] becomes the r-th part. Numbers of elements are checked, shapes are free.
  Work all_gather(at::Tensor out, at::Tensor in) const;
  /// in [size() * n ...] -> out [n ...]: this rank's part of the reduction. `out` may be that part of `in` (in place).
  Work reduce_scatter(at::Tensor out, at::Tensor in, ReduceOp op = ReduceOp::sum) const;
  /// Even split of dim 0: part r of `in` goes to rank r, part r of `out` comes from rank r.
  Work all_to_all(at::Tensor out, at::Tensor in) const;
  /// Uneven: splits are rows of dim 0, one number per rank, zeros allowed; they sum to size(0).
  Work all_to_all(at::Tensor out, at::Tensor in, std::vector<int64_t> out_rows, std::vector<int64_t> in_rows) const;
  Work broadcast(at::Tensor tensor, int root) const;
  /// Messages between one pair of ranks arrive in the order in which they were sent; shapes and dtypes must agree.
  Work send(at::Tensor tensor, int peer) const;
  Work recv(at::Tensor tensor, int peer) const;
  void barrier() const;

  /// Gathers one string per rank (for checks and messages at set-up, not for the hot path).
  std::vector<std::string> all_gather_text(const std::string& mine) const;

  /// Uninitialised tensor in memory that this back end moves without staging (shared memory on `local`, plain memory
  /// elsewhere). Collective: all members call it with the same number of bytes. Freed when the last reference goes.
  /// `options`: dtype, and meta for a rehearsal of a program that runs on the meta device.
  at::Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) const;

  /// Collective. Members with one colour form a new Comm, ordered by (key, rank). A negative colour gives a size-1 Comm.
  /// ConfigError in a rehearsal, where nobody says the others' colours: use the next one.
  Comm split(int color, int key, const std::string& name) const;
  /// The same when every member knows everybody's place: `place` is the same function on all. Also in a rehearsal.
  Comm split(const std::function<SplitPlace(int rank)>& place, const std::string& name) const;

  /// The same group with another deadline. Default: WorldOptions::timeout.
  Comm with_timeout(std::chrono::milliseconds timeout) const;

  /// True in World::rehearse(): calls are checked and counted, nothing is moved.
  bool is_rehearsal() const;

  /// Calls and bytes of this group on this rank, by operation ("all_reduce", ...); operations never called are absent.
  std::map<std::string, TrafficCount> traffic() const;

  /// The last calls of this rank in all groups of its world, as JSON (empty object when alone). Any thread.
  std::string flight_log() const;

  /// Lets calls in flight go on without blocking; the data-parallel engine calls it between units of backward. Throws
  /// CommError once the world has failed.
  void progress() const;

  /// As World::abort, for whoever was given a Comm alone: ends the calls of all ranks of its world with `reason`.
  void abort(const std::string& reason) const;

  /// What stands behind it (comm/state.h: the c10d back end, for interoperability).
  const std::shared_ptr<detail::CommState>& state() const { return state_; }

 private:
  std::shared_ptr<detail::CommState> state_;
};

}  // namespace weft
