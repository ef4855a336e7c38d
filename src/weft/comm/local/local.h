// local: the back end for ranks that share one machine, as threads of one process or as processes. Data goes through shared
// memory (memfd: no names, no ports, no /dev/shm); reductions run in rank order, so results are bit-equal from run to run.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/comm/local/types.h"
#include "weft/core/error.h"

namespace weft::local {

class Engine;  // a rank's side of the shared memory; free of torch types
class Group;
class Lane;
struct Op;
enum class Until;

/// Handle of a call in flight. Calls of one rank come from one thread at a time; any of test(), wait() and released() drives
/// every call of this rank in every group, so that waiting on one never starves another. A dropped handle is fine: the call
/// keeps its tensors alive and goes on whenever this rank is inside any call.
class LocalWork : public c10d::Work {
 public:
  LocalWork(std::shared_ptr<Engine> engine, std::shared_ptr<Op> op, c10d::OpType type, std::vector<at::Tensor> outputs);

  /// True when the output is valid. Makes progress, never blocks. Throws CommError once the call or the world has failed.
  bool test();
  /// True when, besides, no peer reads the input any more. Makes progress, never blocks. Throws as test().
  bool test_released();
  /// Returns when the output is valid. `timeout` zero: the call's or the group's. Throws CommError.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  /// Returns when the output is valid and the input may be overwritten. For inputs in private memory wait() implies it;
  /// inputs from LocalGroup::allocate are read by the peers in place.
  void wait_released(std::chrono::milliseconds timeout = kNoTimeout);

  bool isCompleted() override;           ///< as test(), but a failure counts as completed (c10d's meaning)
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  void synchronize() override { wait(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  uint64_t getSequencenumber() const override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;  ///< completes the call first: it has no thread of its own

 private:
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Op> op_;
  std::vector<at::Tensor> outputs_;
  std::exception_ptr failure_;
};

/// A set of ranks of one LocalWorld, as a c10d back end. Tensors must be contiguous CPU tensors (ConfigError otherwise).
/// Reductions: fp32, fp64, bf16, fp16, int8, uint8, int16, int32, int64 with sum, avg, min, max, product (integer avg
/// truncates towards zero); bool with sum and max (or), min and product (and); bf16 and fp16 accumulate in fp32 and round
/// once. Calls that only move data take every dtype. Sequence numbers count from 0 per group; send and recv have their own
/// count per pair and direction. Peers that disagree on operation, dtype, size, root, tag or reduction get a CommError that
/// names both sides.
class LocalGroup : public c10d::Backend {
 public:
  LocalGroup(std::shared_ptr<Engine> engine, std::shared_ptr<Group> group);
  ~LocalGroup() override;

  const std::string getBackendName() const override { return "weft_local"; }
  const std::vector<int>& world_ranks() const;
  const std::string& name() const;
  std::chrono::milliseconds timeout() const { return timeout_; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }

  /// Uninitialised tensor in memory that all members have mapped: as an input it is read in place instead of being staged.
  /// Collective; all members ask for the same number of bytes. Its pages go back to the system when the last reference to
  /// the tensor on this rank goes, on any thread; the address range follows once all members have dropped theirs.
  /// ConfigError when the system has not enough memory, on all members.
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype);

  /// Drives every call of this rank without blocking. Throws CommError once the world has failed.
  void progress();

  // The calls as Comm makes them, without a handle of c10d's: the same checks and errors. The call keeps its tensors alive. Driven
  // by test() and wait(); like a dropped LocalWork it goes on whenever this rank is inside any call.
  using Timeout = std::chrono::milliseconds;  // zero: the group's
  std::shared_ptr<Op> start_all_reduce(const at::Tensor& tensor, Reduce reduction, Timeout timeout);
  std::shared_ptr<Op> start_all_gather(const at::Tensor& output, const at::Tensor& input, Timeout timeout);
  std::shared_ptr<Op> start_reduce_scatter(const at::Tensor& output, const at::Tensor& input, Reduce reduction, Timeout timeout);
  /// Splits count rows of dim 0; both empty: even.
  std::shared_ptr<Op> start_all_to_all(const at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_splits,
                                       const std::vector<int64_t>& input_splits, Timeout timeout);
  std::shared_ptr<Op> start_broadcast(const at::Tensor& tensor, int root, Timeout timeout);
  std::shared_ptr<Op> start_send(const at::Tensor& tensor, int destination, Timeout timeout, int tag = 0);
  std::shared_ptr<Op> start_recv(const at::Tensor& tensor, int source, Timeout timeout, int tag = 0);
  std::shared_ptr<Op> start_barrier(Timeout timeout);
  /// Whether the call is that far; never blocks. Throws CommError once it or the world has failed.
  bool test(Op& op, Until until);
  /// Returns when the call is that far. Throws CommError.
  void wait(Op& op, Until until);
  /// Engine::wait_unless_needed.
  bool wait_unless_needed(Op& op);

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& opts) override;
  /// Splits count rows of dim 0; both empty: even.
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                               std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int destination, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int source, int tag) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts) override;
  uint64_t getSequenceNumberForGroup() override;

 private:
  std::shared_ptr<Op> launch(Lane& lane, std::shared_ptr<Op> op, Timeout timeout);
  c10::intrusive_ptr<c10d::Work> work(std::shared_ptr<Op> op, c10d::OpType type, std::vector<at::Tensor> outputs);
  int member(int64_t rank, const char* role) const;
  int peer(int rank) const;

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Group> group_;
  std::chrono::milliseconds timeout_{kBackendDefaultTimeout};
};

/// Why a world failed: the first reason that any rank gave.
struct Abort {
  std::vector<int> culprits;   ///< world ranks at fault; the rank that called abort() for an abort by the user
  std::string reason;
};

/// One rank's attachment to the ranks of this machine. When it and all its groups are gone, the peers know that this rank
/// is done: they fail only if they still need it. A rank that ends without that (killed, exit, crash) fails the world within
/// about 100 ms for everybody who waits, with "rank R exited or was killed".
class LocalWorld {
 public:
  /// Ranks are threads of this process, at most kMaxRanks: the i-th element is for rank i, used from its own thread.
  static std::vector<std::shared_ptr<LocalWorld>> in_process(int size);

  /// Ranks are processes of one user on one machine. `key` names the job (launcher's address, port, run id); the same for
  /// all ranks and unused by others at the same time. Rank 0 creates the memory; every pair of ranks keeps a Unix socket
  /// open, whose end-of-file says that the peer is gone. CommError naming the ranks that did not come within `timeout`;
  /// ConfigError when ranks disagree on the size, a rank comes twice, or there is not enough memory.
  static std::shared_ptr<LocalWorld> join(const std::string& key, int rank, int size, std::chrono::milliseconds timeout);

  ~LocalWorld();

  int rank() const;
  int size() const;

  /// Fails the world: every wait of every rank in every group ends within about 100 ms with CommError, its cause `reason`
  /// and its peers `culprit` (usually rank()). The first call of all ranks wins; later ones change nothing. Any thread.
  void abort(int culprit, const std::string& reason);
  std::optional<Abort> aborted() const;

  /// Collective over `world_ranks` (distinct; this rank among them), which other ranks do not call. Members pass the same
  /// ranks in the same order and the same name, and create groups that share members in the same order. A name may be used
  /// again. The group keeps the attachment alive.
  c10::intrusive_ptr<LocalGroup> create_group(std::vector<int> world_ranks, std::string name,
                                              std::chrono::milliseconds timeout);

  /// The torch-free engine behind it, for tests.
  const std::shared_ptr<Engine>& engine() const { return engine_; }

 private:
  explicit LocalWorld(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}
  std::shared_ptr<Engine> engine_;
};

}  // namespace weft::local
