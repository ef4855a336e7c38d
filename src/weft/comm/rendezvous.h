// The store in which the ranks of a launched job meet (torchrun's convention: MASTER_ADDR and MASTER_PORT).
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

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

}  // namespace weft::detail
