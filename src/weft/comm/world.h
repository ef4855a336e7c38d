// World: where ranks come from.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "weft/comm/comm.h"

namespace c10d {
class Store;
}

namespace weft {

/// Which back end carries the calls. `automatic`: what the variable WEFT_BACKEND says (local, gloo), else local when all
/// ranks share this machine, else gloo. `fake` communicates nothing: shapes are right, everything is checked and counted.
enum class BackendKind { automatic, local, gloo, fake };

struct WorldOptions {
  BackendKind backend = BackendKind::automatic;
  /// Deadline of each call: local counts from the slowest peer's last sign of life, others from the moment at which this
  /// rank waits. Nothing runs while nobody is inside a call. Minutes in training, 60 s or less in tests.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
};

/// Copies `bytes` bytes at `data` from rank `root` to all ranks; all call it together.
using Broadcast = std::function<void(void* data, size_t bytes, int root)>;

namespace detail {
class WorldState;
}

/// The ranks of a job as this process (or thread) sees them. Copyable handle; several worlds may live in one process.
class World {
 public:
  /// Reads the launcher's environment (torchrun, Slurm, Open MPI, PMI, `weft run`), or is alone (size 1).
  static World init(WorldOptions options = {});

  /// Runs fn on n threads of this process, each a rank, on the local back end, and joins them. If ranks fail, the first
  /// failure aborts the others and is rethrown here. Allocator, default generator and profiler are shared by the threads.
  static void threads(int n, const std::function<void(World&)>& fn, WorldOptions options = {});

  /// Ranks that meet in a c10d store of the host program (gloo). All pass the same store; a prefix of its own keeps worlds
  /// apart. The local ranks are taken to be unknown: local_rank() = 0, local_size() = 1.
  static World from_store(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, WorldOptions options = {});

  /// One group of the host program's own, any c10d back end. Splitting needs a store; abort() reaches this rank only.
  static World from_backend(const c10::intrusive_ptr<c10d::Backend>& backend, WorldOptions options = {});

  /// The ranks of a host program that has its own way to reach all of them, an MPI communicator above all; Weft itself does
  /// not link MPI. Collective. Ranks of one machine get `local`, others `gloo` over a store that rank 0 serves on a free port.
  ///   int rank, size;  MPI_Comm_rank(comm, &rank);  MPI_Comm_size(comm, &size);
  ///   auto world = weft::World::from_mpi(rank, size, [&](void* data, size_t bytes, int root) {
  ///     MPI_Bcast(data, static_cast<int>(bytes), MPI_BYTE, root, comm); });
  /// `broadcast` copies root's bytes to all ranks; it is not kept and carries a few hundred bytes per rank in all.
  static World from_mpi(int rank, int size, const Broadcast& broadcast, WorldOptions options = {});

  /// Rank `rank` of `size` without any peers (BackendKind::fake).
  static World rehearse(int rank, int size);

  int rank() const;
  int size() const;
  int local_rank() const;  ///< index among the ranks of this host
  int local_size() const;
  int node() const;        ///< index of this host

  /// All ranks.
  const Comm& comm() const;

  /// Ends every peer's wait within a second: each throws CommError with this reason and this rank. Idempotent; the first
  /// reason wins. Later calls on any group of this world throw the same.
  void abort(const std::string& reason) const;

 private:
  explicit World(std::shared_ptr<detail::WorldState> state) : state_(std::move(state)) {}
  std::shared_ptr<detail::WorldState> state_;
};

/// Calls fn; an exception aborts the world with its text before it goes on to the caller.
void guard(const World& world, const std::function<void()>& fn);

}  // namespace weft
