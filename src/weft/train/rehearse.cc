#include "weft/train/rehearse.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>

#include "weft/comm/world.h"
#include "weft/core/error.h"
#include "weft/core/system.h"
#include "weft/memory/cpu_allocator.h"
#include "weft/memory/kernel_scratch.h"
#include "weft/train/learner.h"

namespace weft::train {
namespace {

/// Kernels borrow scratch for every thread. This process gets its number back.
class Threads {
 public:
  explicit Threads(int count) : before_(at::get_num_threads()) { at::set_num_threads(count); }
  ~Threads() { at::set_num_threads(before_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int before_;
};

/// Over all axes.
std::map<std::string, TrafficCount> traffic_of(const Learner& learner, const Axes& axes) {
  auto counts = learner.data_parallel().traffic();
  for (const auto& [op, count] : axes.tp.comm().traffic()) {
    TrafficCount& sum = counts[op];
    sum = {.calls = sum.calls + count.calls, .bytes = sum.bytes + count.bytes, .sent = sum.sent + count.sent};
  }
  return counts;
}

}  // namespace

Rehearsal rehearse(const config::RunConfig& config, int rank, int ranks) {
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    throw ConfigError(fmt::format("rank {} of a world of {}: ranks are counted from 0, below the size of the world", rank, ranks));
  }
  if (config.layout.pp > 1) {
    throw ConfigError(fmt::format("layout.pp = {}: rehearsals of pipelines are not there yet (nobody would send the shapes of activations). Rehearse a "
                                  "stage's layers with layout.pp = 1", config.layout.pp));
  }
  constexpr int64_t kSteps = 2;
  const Job job = make_job(config, ranks);
  const int64_t cores = usable_cores();
  const Threads threads(rank_threads(job, cores, std::min<int64_t>(ranks, cores)));
  memory::install_meta_counter();
  const memory::KernelScratch scratch;
  const World world = World::rehearse(rank, ranks);
  const Axes axes = make_axes(job, world);
  Learner learner(job, axes, at::kMeta);
  const data::TrainBatches batches = train_batches(job, axes.dp);
  Rehearsal result;
  for (int64_t step = 0; step < kSteps; ++step) {
    const int64_t before = memory::usage(memory::Space::meta).allocations;
    result.traffic = traffic_of(learner, axes);
    learner.accumulate(batches, step);
    if (step == 0) memory::reset_peak(memory::Space::meta);  // building the model is not training
    learner.apply(job.config.optimizer.lr);
    result.allocations = memory::usage(memory::Space::meta).allocations - before;
  }
  result.memory = memory::usage(memory::Space::meta);
  for (const auto& [op, count] : traffic_of(learner, axes)) {
    TrafficCount& step = result.traffic[op];
    step = {.calls = count.calls - step.calls, .bytes = count.bytes - step.bytes, .sent = count.sent - step.sent};
  }
  return result;
}

}  // namespace weft::train
