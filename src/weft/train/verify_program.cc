#include "weft/train/verify_program.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>

#include "weft/comm/mesh.h"
#include "weft/core/cause.h"
#include "weft/core/error.h"
#include "weft/layout/part.h"
#include "weft/nn/placement.h"
#include "weft/optim/optim.h"
#include "weft/train/layout_text.h"
#include "weft/train/learner.h"
#include "weft/train/training_trace.h"

namespace weft {
namespace {

using train::TrainingTrace;

const char* name_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble: return "fp64";
    case at::kBFloat16: return "bf16";
    case at::kHalf: return "fp16";
    default: return "fp32";
  }
}

/// Values that did not come from weft::deferred depend on who drew them.
void copy_start_values(torch::nn::Module& module, const std::vector<NamedTensor>& starts) {
  const at::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> whole;
  for (const NamedTensor& start : starts) whole[start.name] = start.tensor;
  for (const auto& p : module.named_parameters()) {
    const auto found = whole.find(p.key());
    if (p.value().is_meta() || found == whole.end()) continue;
    const auto placement = nn::placement_of(p.value());
    const bool cut = placement && placement->dim >= 0;
    const at::Tensor part = cut ? found->second.narrow(placement->dim, placement->begin, p.value().size(placement->dim)) : found->second;
    if (part.sizes() == p.value().sizes()) p.value().detach().copy_(part);
  }
}

void check_shared_out(const torch::nn::Module& module, const Comm& tp) {
  if (tp.size() == 1) return;
  for (const at::Tensor& p : module.parameters()) {
    if (nn::placement_of(p)) return;
  }
  throw ConfigError(fmt::format("the layout has {} tensor-parallel ranks, and make_model shares nothing out over them: call weft::parallelize(*module, ranks.tp, plan)",
                                tp.size()));
}

/// This rank's rows of each pass of a step. Every rank makes as many passes.
struct Rows {
  int64_t samples, passes;
  layout::Part mine;

  Rows(const std::vector<at::Tensor>& batch, const Comm& dp, int64_t micro_batch) : samples(batch.empty() || batch[0].dim() == 0 ? 0 : batch[0].size(0)) {
    for (const at::Tensor& t : batch) {
      if (t.dim() > 0 && t.size(0) == samples) continue;
      throw ConfigError("make_batch: dim 0 of every tensor are the samples; they have different numbers of them");
    }
    const int64_t least = samples / dp.size(), most = (samples + dp.size() - 1) / dp.size();
    passes = micro_batch > 0 ? (most + micro_batch - 1) / micro_batch : 1;
    if (least < passes) throw ConfigError(fmt::format("a batch of {} samples for {} ranks in {} passes each: use larger batches", samples, dp.size(), passes));
    mine = layout::part_of(samples, dp.size(), dp.rank());
  }
  std::vector<at::Tensor> of_pass(const std::vector<at::Tensor>& batch, int64_t pass) const {
    const layout::Part part = layout::part_of(mine.size, passes, pass);
    std::vector<at::Tensor> rows;
    for (const at::Tensor& t : batch) rows.push_back(t.narrow(0, mine.begin + part.begin, part.size));
    return rows;
  }
};

struct Run {
  const MakeModel& make_model;
  const MakeBatch& make_batch;
  const VerifyOptions& options;

  std::unique_ptr<torch::optim::Optimizer> optimizer_of(const DataParallel& dp) const {
    if (options.make_optimizer) return options.make_optimizer(dp);
    const bool fp64 = dp.parameters().front().tensor.scalar_type() == at::kDouble;
    auto adamw = torch::optim::AdamWOptions(options.learning_rate).eps(fp64 ? 1e-6 : 1e-4).weight_decay(0.1);
    return std::make_unique<optim::AdamW>(optim::decay_matrices_only(dp, adamw));
  }

  /// world: the ranks of the layout; reference: null for the reference itself.
  TrainingTrace operator()(const VerifyRanks& ranks, const Comm& world, const config::RunConfig& layout, const TrainingTrace* reference, bool keep) const {
    const VerifyProgram program = make_model(ranks);
    if (!program.module || !program.loss_sum) throw ConfigError("make_model returned a VerifyProgram without module or without loss_sum");
    check_shared_out(*program.module, ranks.tp);
    if (reference != nullptr) copy_start_values(*program.module, reference->starts);
    DataParallelOptions dp_options = options.data_parallel;
    train::set_sharding(layout.parallel, dp_options);
    dp_options.grad_scale = GradScale::sum;
    DataParallel dp(program.module, ranks.dp, dp_options);
    const auto optimizer = optimizer_of(dp);
    train::TraceRecorder recorder(*program.module, dp, world, keep);
    for (int64_t step = 0; step < options.steps; ++step) {
      const std::vector<at::Tensor> batch = make_batch(step);
      const Rows rows(batch, ranks.dp, layout.train.micro_batch);
      const at::Tensor loss = at::zeros({1}, at::kDouble);
      for (int64_t pass = 0; pass < rows.passes; ++pass) {
        train::start_pass(dp, pass, rows.passes);
        const at::Tensor sum = program.loss_sum(rows.of_pass(batch, pass));
        scale_loss(sum, rows.samples, dp).backward();
        loss.add_(sum.detach().to(at::kDouble));
      }
      ranks.dp.all_reduce(loss).wait();
      if (program.loss_of_part) ranks.tp.all_reduce(loss).wait();
      const double norm = options.clip_norm > 0 ? dp.clip_grad_norm(options.clip_norm) : dp.grad_norm();
      recorder.step(loss.item<double>() / static_cast<double>(rows.samples), norm, options.clip_norm);
      dp.step(*optimizer);
      dp.zero_grad();
    }
    return recorder.finish();
  }
};

/// The layout's axes over `world`; what the world has more of runs side by side.
TrainingTrace run_on(const World& world, const Run& run, const config::RunConfig& layout, const TrainingTrace* reference) {
  const Mesh mesh(world, {{"beside", world.size() / train::ranks_of(layout)}, {"dp", layout.layout.dp}, {"tp", layout.layout.tp}});
  const VerifyRanks ranks{.dp = mesh["dp"], .tp = mesh["tp"], .sequence_parallel = layout.parallel.sequence_parallel};
  return run(ranks, world.comm(), layout, reference, world.rank() == 0);
}

TrainingTrace on_threads(const Run& run, const config::RunConfig& layout, const TrainingTrace* reference) {
  TrainingTrace first;
  World::threads(static_cast<int>(train::ranks_of(layout)), [&](World& world) {
    TrainingTrace trace = run_on(world, run, layout, reference);
    if (world.rank() == 0) first = std::move(trace);
  });
  return first;
}

/// World rank 0 has compared.
void share(VerifyRow& row, const Comm& world) {
  const at::Tensor numbers = at::tensor({row.loss, row.norm, row.gradient, row.weight}, at::kDouble);
  world.broadcast(numbers, 0).wait();
  const auto* n = numbers.const_data_ptr<double>();
  row = {.layout = row.layout, .ranks = row.ranks, .loss = n[0], .norm = n[1], .gradient = n[2], .weight = n[3], .first = world.all_gather_text(row.first).front()};
}

}  // namespace

VerifyReport verify(const MakeModel& make_model, const MakeBatch& make_batch, const std::string& layouts, const VerifyOptions& options) {
  const Run run{make_model, make_batch, options};
  const std::vector<std::string> texts = train::split_layouts(layouts, /*any_key=*/false);
  const World* world = options.world && options.world->size() > 1 ? &*options.world : nullptr;
  std::optional<train::OneThread> one_thread;
  if (world == nullptr) one_thread.emplace();
  at::ScalarType dtype = at::kFloat;
  // Each process trains the reference, so that nobody waits for another's.
  TrainingTrace reference;
  World::threads(1, [&](World& alone) {
    const MakeModel noting = [&](const VerifyRanks& ranks) {
      VerifyProgram program = make_model(ranks);
      if (program.module && !program.module->parameters().empty()) dtype = program.module->parameters().front().scalar_type();
      return program;
    };
    reference = run_on(alone, Run{noting, make_batch, options}, train::with_layout({}, ""), nullptr);
  });
  train::check_alive(reference);
  VerifyReport report = train::make_report(name_of(dtype), options.steps, options.tolerance);
  for (const std::string& text : texts) {
    const config::RunConfig layout = train::with_layout({}, text, /*any_key=*/false);
    VerifyRow row{.layout = text, .ranks = static_cast<int>(train::ranks_of(layout))};
    if (world == nullptr) {
      try {
        compare(on_threads(run, layout, &reference), reference, options.learning_rate, report, row);
      } catch (const std::exception& error) {
        train::fail(row, cause_text(error.what()));
      }
    } else if (world->size() % row.ranks != 0) {
      train::fail(row, fmt::format("not run: it has {} ranks, which do not divide this job's {}", row.ranks, world->size()));
    } else {
      const TrainingTrace trace = run_on(*world, run, layout, &reference);
      if (world->rank() == 0) compare(trace, reference, options.learning_rate, report, row);
      share(row, world->comm());
    }
    report.rows.push_back(std::move(row));
  }
  return report;
}

}  // namespace weft
