// The real program of one rank of any world, on the meta device: no other ranks, no memory, no arithmetic.
#pragma once

#include <map>
#include <string>

#include "weft/comm/comm.h"
#include "weft/config/run_config.h"
#include "weft/memory/account.h"

namespace weft::train {

struct Rehearsal {
  memory::Usage memory;                         ///< as the real run's accounts; peaks are those of training, without the model's construction
  std::map<std::string, TrafficCount> traffic;  ///< calls and bytes of the last step, by operation
  int64_t allocations = 0;                      ///< of the last step
};

/// Builds the model, the data-parallel engine and the optimizer of rank `rank` of `ranks`, and trains two steps of the
/// configured micro-batches (the first makes the optimizer's state). Tensors are made and freed as the real run makes and frees
/// them, so the bytes by category and their peak are its bytes: exactly in fp32 and fp64; 16-bit products of oneDNN borrow some
/// packing scratch besides while they run. Scratch of kernels is that of train.threads threads, or of what a rank would take on
/// this machine. Token files are opened, for their size and vocabulary. ConfigError as make_job.
Rehearsal rehearse(const config::RunConfig& config, int rank, int ranks);

}  // namespace weft::train
