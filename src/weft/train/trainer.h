// The training loop.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "weft/comm/world.h"
#include "weft/config/run_config.h"
#include "weft/train/job.h"
#include "weft/train/metrics.h"
#include "weft/train/offload_report.h"

namespace weft::train {

/// What the caller may add to a run.
struct RunHooks {
  /// Called on every rank when the job is known, before a model exists.
  std::function<void(const Job&)> on_job;
  /// Asked once per step; when it is true on any rank, all ranks stop after the same step.
  std::function<bool()> stop_requested;
  /// Called on rank 0 after every step.
  std::function<void(const StepRecord&)> on_step;
};

/// Share of the pipeline ranks' time that is not compute.
struct BubbleReport {
  double measured = 0;   ///< mean of the steps
  double planned = 0;    ///< of the schedule, when stages are equal, and F, I and W take the same time
  std::string schedule;
};

struct RunResult {
  int64_t steps = 0;               ///< updates done
  bool stopped = false;            ///< asked to stop before the last one
  double loss = 0;                 ///< of the last step
  /// After the last step, over all validation samples, of the weights and their averages; empty when stopped.
  std::optional<double> val_loss, val_loss_ema;
  std::optional<BubbleReport> bubble;    ///< with pipeline parallelism
  std::optional<OffloadReport> offload;  ///< of this rank; empty when no state is on a disk
  std::vector<memory::Usage> memory;  ///< of every rank after the last step; empty unless the CPU allocator is installed
};

/// Trains as configured on all ranks of `world` and writes run.dir on rank 0. Collective. Every rank passes the same
/// configuration (ConfigError names the rank that does not). A loss or gradient that is not finite ends the run with a
/// ConfigError before the update, so that the error names the step that went wrong. So does a lack of memory; the text says
/// what held it and what would help most.
RunResult run(const config::RunConfig& config, World& world, const RunHooks& hooks = {});

}  // namespace weft::train
