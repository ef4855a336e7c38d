#include "weft/train/trainer.h"

#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "weft/config/parse.h"
#include "weft/core/cause.h"
#include "weft/core/error.h"
#include "weft/core/log.h"
#include "weft/train/agree.h"
#include "weft/train/evaluate.h"
#include "weft/memory/cpu_allocator.h"
#include "weft/train/learner.h"
#include "weft/train/memory_report.h"
#include "weft/train/run_folder.h"
#include "weft/train/stages.h"
#include "weft/train/weights.h"

namespace weft::train {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

optim::LearningRate learning_rate(const config::RunConfig& c) {
  using Kind = optim::LearningRate::Kind;
  const Kind kind = c.schedule.name == "cosine"   ? Kind::cosine
                    : c.schedule.name == "linear" ? Kind::linear
                    : c.schedule.name == "wsd"    ? Kind::wsd
                    : c.schedule.name == "inverse_sqrt" ? Kind::inverse_sqrt
                                                        : Kind::constant;
  return {.kind = kind,
          .peak = c.optimizer.lr,
          .warmup = c.schedule.warmup,
          .total = c.train.steps,
          .decay = c.schedule.decay,
          .final_ratio = c.schedule.final_ratio};
}

void check_finite(int64_t step, const char* what, double value) {
  if (std::isfinite(value)) return;
  throw ConfigError(
      fmt::format("step {}: the {} is {} (training diverged: lower optimizer.lr, lengthen schedule.warmup, set "
                  "optimizer.clip_norm, or use train.dtype = \"fp32\"); weights before this step were not damaged, "
                  "nor saved",
                  step, what, value));
}

/// The run as one rank sees it.
class Loop {
 public:
  Loop(const Job& job, World& world, const RunHooks& hooks, RunFolder* folder)
      : job_(job),
        axes_(make_axes(job, world)),
        hooks_(hooks),
        folder_(folder),
        learner_(job, axes_),
        batches_(train_batches(job, axes_.dp)),
        rate_(learning_rate(job.config)) {
    if (world.rank() == 0 && !axes_.text.empty()) log(LogLevel::note, "mesh " + axes_.text);
  }

  RunResult run() {
    RunResult result;
    while (result.steps < job_.config.train.steps && !result.stopped) {
      const StepRecord record = step(result.steps, result.stopped);
      result.steps = record.step;
      result.loss = record.loss;
      const bool last = record.step == job_.config.train.steps;
      result.val_loss = last ? record.val_loss : std::nullopt;
      result.val_loss_ema = last ? record.val_loss_ema : std::nullopt;
      if (folder_) folder_->append(record);
      if (hooks_.on_step && axes_.world.rank() == 0) hooks_.on_step(record);
    }
    if (Pipeline* pipeline = learner_.pipeline(); pipeline != nullptr && result.steps > 0) {
      result.bubble = BubbleReport{.measured = bubble_ / static_cast<double>(result.steps),
                                   .planned = planned_bubble(pipeline->schedule_of(static_cast<int>(batches_.accumulation()))),
                                   .schedule = job_.config.parallel.schedule};
    }
    if (const auto use = learner_.offload_use()) result.offload = report_offload(*use);
    result.memory = usage_of_ranks(axes_.world);
    return result;
  }

  Learner& learner() { return learner_; }

 private:
  StepRecord step(int64_t update, bool& stopped) {
    const auto begin = Clock::now();
    const StepResult mine = learner_.accumulate(batches_, update);
    // One small reduction carries the loss and the wish to stop, so that all ranks stop after the same step.
    const bool stop = hooks_.stop_requested && hooks_.stop_requested();
      const at::Tensor shared = at::tensor({axes_.counts_loss() ? mine.loss_sum : 0.0, stop ? 1.0 : 0.0}, at::kDouble);
    axes_.world.all_reduce(shared).wait();

    StepRecord record;
    record.step = update + 1;
    record.loss = shared[0].item<double>() / static_cast<double>(batches_.tokens_per_step());
    record.grad_norm = mine.grad_norm;
    record.bubble = mine.bubble;
    if (mine.bubble) bubble_ += *mine.bubble;
    record.skipped = mine.skip;
    record.loss_scale = learner_.loss_scale();
    record.lr = rate_.at(update - skipped_);  // a skipped step does not advance the schedule
    check_finite(record.step, "loss", record.loss);
    check_finite(record.step, "gradient norm", record.grad_norm);
    if (mine.skip) {
      ++skipped_;
    } else {
      learner_.apply(record.lr);
    }
    stopped = shared[1].item<double>() > 0 && record.step < job_.config.train.steps;

    record.step_s = seconds_since(begin);
    record.tokens_per_s = static_cast<double>(batches_.tokens_per_step()) / record.step_s;
    record.tokens = record.step * batches_.tokens_per_step();
    record.epoch = static_cast<double>(record.step) * static_cast<double>(job_.config.train.global_batch) /
                   static_cast<double>(job_.train.size());
    if (!stopped) validate(record);
    record.elapsed_s = seconds_since(start_);
    if (memory::account(memory::Space::cpu).counting()) record.memory = memory::usage().at_peak;
    return record;
  }

  void validate(StepRecord& record) {
    const auto& c = job_.config.train;
    const bool last = record.step == c.steps;
    if (!job_.val || !(last || (c.eval_every > 0 && record.step % c.eval_every == 0))) return;
    const auto measure = [&] {
      return evaluate(learner_.model(), *job_.val, last ? 0 : c.eval_samples, job_.accumulation.micro_batch, axes_.dp, learner_.pipeline());
    };
    record.val_loss = measure();
    if (optim::Ema* ema = learner_.ema()) record.val_loss_ema = ema->with_averages(learner_.data_parallel(), measure);
  }

  const Job& job_;
  Axes axes_;
  const RunHooks& hooks_;
  RunFolder* folder_;
  Learner learner_;
  data::TrainBatches batches_;
  optim::LearningRate rate_;
  int64_t skipped_ = 0;
  double bubble_ = 0;  // sum over the steps
  Clock::time_point start_ = Clock::now();
};

nlohmann::json summary(const RunResult& result) {
  nlohmann::json json{{"steps", result.steps}, {"loss", result.loss}, {"reason", result.stopped ? "stopped" : "done"}};
  if (result.val_loss) json["val_loss"] = *result.val_loss;
  if (result.val_loss_ema) json["val_loss_ema"] = *result.val_loss_ema;
  if (result.bubble) json["bubble"] = {{"schedule", result.bubble->schedule}, {"measured", result.bubble->measured}, {"planned", result.bubble->planned}};
  if (result.offload) json["offload"] = nlohmann::json::parse(to_json(*result.offload));
  for (const memory::Usage& usage : result.memory) json["memory"].push_back(nlohmann::json::parse(to_json(usage.at_peak)));
  return json;
}

RunResult train(const Job& job, World& world, const RunHooks& hooks, RunFolder* folder) {
  Loop loop(job, world, hooks, folder);
  if (folder) {
    const nlohmann::json start{{"ranks", world.size()}, {"parameters", model::parameter_count(job.spec)}};
    folder->event("start", start.dump());
  }
  const RunResult result = loop.run();
  Learner& learner = loop.learner();
  const auto save = [&](bool averaged) {
    save_weights(learner.data_parallel(), world.comm(), job, folder ? folder->weights_path(averaged) : "");
  };
  save(false);
  if (learner.ema()) learner.ema()->with_averages(learner.data_parallel(), [&] { save(true); });
  if (folder) folder->finished();
  if (folder) folder->event("finish", summary(result).dump());
  return result;
}

}  // namespace

RunResult run(const config::RunConfig& config, World& world, const RunHooks& hooks) {
  const Comm& comm = world.comm();
  check_equal(comm, "configuration", config::to_toml(config, false));
  const Job job = make_job(config, comm.size());
  if (hooks.on_job) hooks.on_job(job);
  std::unique_ptr<RunFolder> folder;
  on_rank_zero(comm, [&] { folder = std::make_unique<RunFolder>(job); });
  try {
    return explain_out_of_memory(job, comm.rank(), [&] { return train(job, world, hooks, folder.get()); });
  } catch (const std::exception& error) {
    if (folder) folder->event("failure", nlohmann::json{{"error", cause_text(error.what())}}.dump());
    throw;
  }
}

}  // namespace weft::train
