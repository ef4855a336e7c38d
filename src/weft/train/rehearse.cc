#include "weft/train/rehearse.h"

#include <fmt/format.h>

#include "weft/comm/world.h"
#include "weft/core/error.h"
#include "weft/memory/cpu_allocator.h"
#include "weft/train/learner.h"

namespace weft::train {

Rehearsal rehearse(const config::RunConfig& config, int rank, int ranks) {
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    throw ConfigError(fmt::format("rank {} of a world of {}: ranks are counted from 0, below the size of the world", rank, ranks));
  }
  constexpr int64_t kSteps = 2;
  const Job job = make_job(config, ranks);
  memory::install_meta_counter();
  const World world = World::rehearse(rank, ranks);
  Learner learner(job, world.comm(), at::kMeta);
  const data::TrainBatches batches = train_batches(job, world.comm());
  Rehearsal result;
  for (int64_t step = 0; step < kSteps; ++step) {
    const int64_t before = memory::usage(memory::Space::meta).allocations;
    result.traffic = learner.data_parallel().traffic();
    learner.accumulate(batches, step);
    if (step == 0) memory::reset_peak(memory::Space::meta);  // building the model is not training
    learner.apply(job.config.optimizer.lr);
    result.allocations = memory::usage(memory::Space::meta).allocations - before;
  }
  result.memory = memory::usage(memory::Space::meta);
  for (const auto& [op, count] : learner.data_parallel().traffic()) {
    TrafficCount& step = result.traffic[op];
    step = {.calls = count.calls - step.calls, .bytes = count.bytes - step.bytes, .sent = count.sent - step.sent};
  }
  return result;
}

}  // namespace weft::train
