#include "weft/train/verify.h"

#include <algorithm>

#include "weft/core/cause.h"
#include "weft/train/layout_text.h"
#include "weft/train/training_trace.h"

namespace weft::train {
namespace {

TrainingTrace trace_of(const Job& job, const World& world, const VerifyOptions& options) {
  const Axes axes = make_axes(job, world);
  Learner learner(job, axes);
  if (options.on_built) options.on_built(learner, world);
  const data::TrainBatches batches = train_batches(job, axes.dp);
  TraceRecorder recorder(*learner.model(), learner.data_parallel(), axes.world, world.rank() == 0);
  for (int64_t step = 0; step < options.steps; ++step) {
    const StepResult mine = learner.accumulate(batches, step);
    const at::Tensor loss = at::full({1}, mine.loss_sum, at::kDouble);
    axes.dp.all_reduce(loss).wait();
    recorder.step(loss.item<double>() / static_cast<double>(batches.tokens_per_step()), mine.grad_norm, job.config.optimizer.clip_norm);
    learner.apply(job.config.optimizer.lr);
    if (options.on_step) options.on_step(learner, world);
  }
  return recorder.finish();
}

TrainingTrace run_layout(const config::RunConfig& config, const VerifyOptions& options) {
  const int ranks = static_cast<int>(ranks_of(config));
  const Job job = make_job(config, ranks);
  TrainingTrace first;
  WorldOptions world_options;
  world_options.timeout = std::chrono::seconds(config.layout.timeout_s);
  if (config.layout.backend == "gloo") world_options.backend = BackendKind::gloo;
  World::threads(ranks, [&](World& world) {
    TrainingTrace trace = trace_of(job, world, options);
    if (world.rank() == 0) first = std::move(trace);
  }, world_options);
  return first;
}

}  // namespace

VerifyReport verify(config::RunConfig config, const std::vector<std::string>& layouts, const VerifyOptions& options) {
  config.optimizer.eps = std::max(config.optimizer.eps, config.train.dtype == "fp64" ? 1e-6 : 1e-4);
  const OneThread threads;
  VerifyReport report = make_report(config.train.dtype, options.steps, options.tolerance);
  VerifyOptions plain = options;
  plain.on_built = nullptr;
  plain.on_step = nullptr;
  const TrainingTrace reference = run_layout(with_layout(config, ""), plain);
  check_alive(reference);
  for (const std::string& layout : layouts) {
    const config::RunConfig changed = with_layout(config, layout);
    VerifyRow row{.layout = layout, .ranks = static_cast<int>(ranks_of(changed))};
    try {
      compare(run_layout(changed, options), reference, config.optimizer.lr, report, row);
    } catch (const std::exception& error) {
      fail(row, cause_text(error.what()));
    }
    report.rows.push_back(std::move(row));
  }
  return report;
}

}  // namespace weft::train
