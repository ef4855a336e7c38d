// The store in which the ranks of a launched job meet (torchrun's convention: MASTER_ADDR and MASTER_PORT).
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

#include "weft/comm/world.h"
#include "weft/launch/environment.h"

namespace weft::detail {

struct JobStore {
  c10::intrusive_ptr<c10d::Store> store;
  int host = -1;  ///< world rank whose process serves it; -1: the launcher's agent
};

/// Rank 0 serves the store, unless the launcher's agent does. It takes over RankEnvironment::listen_fd, so that no other
/// program can get the port first. The store lives as long as the process: ranks that end later still need it. CommError
/// when it cannot be reached in time.
JobStore job_store(const launch::RankEnvironment& env, std::chrono::milliseconds timeout);

/// Where the ranks of a host program stand, found out over its own broadcast.
struct HostProgram {
  int local_rank = 0;
  int local_size = 1;
  int node = 0;
  bool one_host = true;
  std::string key;  ///< the same on all ranks, and no other world's
};

/// Collective.
HostProgram meet(int rank, int size, const Broadcast& broadcast);

/// Collective: a store that rank 0 serves on a free port, until its process ends.
c10::intrusive_ptr<c10d::Store> store_over(int rank, bool one_host, const Broadcast& broadcast, std::chrono::milliseconds timeout);

}  // namespace weft::detail
