#include "weft/parallel/pipeline/pipeline.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "weft/core/error.h"
#include "weft/nn/deferred.h"
#include "weft/parallel/pipeline/gradients.h"
#include "weft/parallel/pipeline/plan.h"

namespace weft {
namespace {

using parallel::ActionTimes;
using parallel::PipelineWork;
using schedule::Kind;

at::Device device_of(const Stages& stages) {
  const auto parameters = stages.module ? stages.module->parameters() : std::vector<at::Tensor>();
  return parameters.empty() ? at::Device(at::kCPU) : parameters.front().device();
}

void make_memory(const Stages& stages) {
  if (!stages.module) return;
  const auto parameters = stages.module->parameters();
  if (std::ranges::any_of(parameters, [](const at::Tensor& p) { return p.is_meta(); })) materialise(*stages.module);
}

Stages checked(Stages stages, const Comm& comm) {
  for (size_t s = 0; s < stages.owner.size(); ++s) {
    const bool mine = stages.owner[s] == comm.rank();
    if (mine == stages.local.contains(static_cast<int>(s))) continue;
    throw ConfigError(fmt::format("stage {} belongs to pipeline rank {}, and rank {} {}", s, stages.owner[s], comm.rank(), mine ? "has no such stage" : "has it, too"));
  }
  return stages;
}

/// Part `k` of `count` along dim 0; parts differ by one row at most.
at::Tensor part_of(const at::Tensor& all, int k, int count) {
  const int64_t rows = all.size(0), begin = rows * k / count, end = rows * (k + 1) / count;
  return all.narrow(0, begin, end - begin);
}

int64_t rows_of(const at::Tensor& tensor, const char* what, int micro_batches) {
  if (!tensor.defined() || tensor.dim() == 0) throw ConfigError(fmt::format("the {} are missing on a rank that needs them", what));
  if (tensor.size(0) < micro_batches) {
    throw ConfigError(fmt::format("{} micro-batches of {} rows ({}): each has one at least; use {} or fewer", micro_batches, tensor.size(0), what, tensor.size(0)));
  }
  return tensor.size(0);
}

int64_t key_of(const std::vector<std::vector<at::Tensor>>& inputs) {
  std::string text;
  for (const auto& list : inputs) text += parallel::to_text(parallel::shapes_of(list)) + ";";
  return static_cast<int64_t>(std::hash<std::string>()(text) >> 1);
}

}  // namespace

struct Pipeline::State {
  State(Stages given, schedule::Maker make, Comm c, LossFn fn, PipelineOptions options)
      : comm(std::move(c)),
        stages(checked(std::move(given), comm)),
        loss_fn(std::move(fn)),
        plan(std::move(make), stages, comm.size(), options.whole_stages),
        gradients(stages, comm) {
    make_memory(stages);
    if (plan.splits() && options.unsplit == Unsplit::refuse) parallel::require_split_backward(stages);
    executor.emplace(stages.local, comm, device_of(stages), plan.splits());
  }

  bool has_first() const { return stages.owner.front() == comm.rank(); }
  bool has_last() const { return stages.owner.back() == comm.rank(); }

  /// Whether shapes of activations are unknown. Collective.
  bool agree(const parallel::PipelinePlan::Made& made, const PipelineWork& work) {
    if (comm.size() == 1) return false;
    const at::Tensor mine = at::tensor({int64_t{made.schedule.micro_batches}, made.fingerprint, has_first() ? key_of(work.inputs) : int64_t{0}}, at::kLong);
    const at::Tensor all = at::empty({comm.size(), 3}, at::kLong);
    comm.all_gather(all, mine).wait();
    const auto said = all.accessor<int64_t, 2>();
    for (int rank = 0; rank < comm.size(); ++rank) {
      if (said[rank][0] != said[0][0]) throw ConfigError(fmt::format("pipeline ranks 0 and {} have {} and {} micro-batches in this step", rank, said[0][0], said[rank][0]));
      if (said[rank][1] != said[0][1]) throw ConfigError(fmt::format("pipeline ranks 0 and {} run different schedules ({} on this rank)", rank, made.schedule.name));
    }
    const int64_t key = said[stages.owner.front()][2];
    return std::exchange(keys[made.schedule.forward_only ? 1 : 0], key) != key;
  }

  PipelineResult run(PipelineWork& work, int micro_batches, bool forward_only) {
    const auto& made = plan.of(micro_batches, forward_only);
    work.learn_shapes = agree(made, work);
    parallel::PipelineOutcome outcome;
    try {
      if (has_first() && std::ssize(work.inputs) != micro_batches) throw ConfigError("inputs are missing on the rank of stage 0, one list per micro-batch");
      if (has_last() && !work.loss && !forward_only) throw ConfigError("a training step needs a loss on the rank of the last stage");
      if (!forward_only) gradients.begin_step();
      work.on_stage_action = [&](Kind kind, int stage) { gradients.carry_out(kind, stage, forward_only); };
      outcome = executor->run(made.schedule, work);
    } catch (const CommError&) {
      throw;
    } catch (const std::exception& error) {
      comm.abort(error.what());
      throw;
    }
    outputs = std::move(outcome.outputs);
    times = std::move(outcome.times);
    for (const auto& [place, sum] : times.of) {
      totals.of[place].seconds += sum.seconds;
      totals.of[place].count += sum.count;
    }
    return shared(outcome.loss);
  }

  /// The same on all ranks. Collective.
  PipelineResult shared(double loss) const {
    const at::Tensor mine = at::tensor({loss, times.busy, times.elapsed}, at::kDouble), all = at::empty({comm.size(), 3}, at::kDouble);
    comm.all_gather(all, mine).released();
    const double longest = all.select(1, 2).max().item<double>();
    PipelineResult result{.loss = all.select(1, 0).sum().item<double>(), .outputs = {}};
    if (longest > 0) result.bubble = 1 - all.select(1, 1).sum().item<double>() / (longest * comm.size());
    return result;
  }

  PipelineResult run_tensors(const std::vector<at::Tensor>& inputs, const at::Tensor& targets, const StepOptions& o, bool forward_only) {
    PipelineWork work;
    work.keep_outputs = o.outputs;
    const DataParallel* dp = gradients.data_parallel();
    const double ranks = dp == nullptr ? 1 : dp->comm().size();
    const bool means = dp != nullptr && dp->options().grad_scale == GradScale::mean_over_ranks;
    try {
      if (has_first()) {
        for (const at::Tensor& x : inputs) rows_of(x, "inputs", o.micro_batches);
        work.inputs.resize(static_cast<size_t>(o.micro_batches));
        for (int k = 0; k < o.micro_batches; ++k) {
          for (const at::Tensor& x : inputs) work.inputs[static_cast<size_t>(k)].push_back(part_of(x, k, o.micro_batches));
        }
      }
      for (int k = 0; k < o.micro_batches && !o.side.empty(); ++k) {
        SideInputs side;
        for (const auto& [name, tensor] : o.side) {
          rows_of(tensor, ("side inputs '" + name + "'").c_str(), o.micro_batches);
          side.emplace(name, part_of(tensor, k, o.micro_batches));
        }
        work.side.push_back(std::move(side));
      }
      if (has_last() && loss_fn) {
        const auto rows = static_cast<double>(rows_of(targets, "targets", o.micro_batches));
        work.loss = [this, &targets, &o, rows](int k, const std::vector<at::Tensor>& out) {
          const at::Tensor target = part_of(targets, k, o.micro_batches);
          return loss_fn(out.at(0), target) * (o.count > 0 ? 1.0 / static_cast<double>(o.count) : static_cast<double>(target.size(0)) / rows);
        };
      }
    } catch (const std::exception& error) {
      comm.abort(error.what());
      throw;
    }
    // The engine averages over ranks, or adds; a mean of rows is to be averaged, sums that share one count are to be added.
    work.gradient_scale = o.count > 0 ? (means ? ranks : 1) : (means ? 1 : 1 / ranks);
    PipelineResult result = run(work, o.micro_batches, forward_only);
    if (dp != nullptr && ranks > 1) {
      const at::Tensor total = at::full({1}, result.loss, at::kDouble);
      dp->comm().all_reduce(total).wait();
      result.loss = total.item<double>() / (o.count > 0 ? 1 : ranks);
    }
    if (o.outputs && has_last()) result.outputs = joined();
    return result;
  }

  std::vector<at::Tensor> joined() const {
    std::vector<at::Tensor> result;
    for (size_t i = 0; i < outputs.at(0).size(); ++i) {
      std::vector<at::Tensor> parts;
      for (const auto& list : outputs) parts.push_back(list.at(i).detach());
      result.push_back(at::cat(parts));
    }
    return result;
  }

  Comm comm;
  Stages stages;
  LossFn loss_fn;
  parallel::PipelinePlan plan;
  parallel::StageGradients gradients;
  std::optional<parallel::Executor> executor;
  std::vector<std::vector<at::Tensor>> outputs;
  ActionTimes times, totals;
  int64_t keys[2] = {-1, -1};  // of the inputs' shapes for which those of activations are known
};

Pipeline::Pipeline(Stages stages, schedule::Maker schedule, Comm comm, LossFn loss_fn, PipelineOptions options)
    : state_(std::make_unique<State>(std::move(stages), std::move(schedule), std::move(comm), std::move(loss_fn), options)) {}
Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;

void Pipeline::reduce_with(DataParallel& dp) { state_->gradients.reduce_with(dp); }
void Pipeline::sync(bool on) { state_->gradients.sync(on); }

PipelineResult Pipeline::step(const at::Tensor& inputs, const at::Tensor& targets, const StepOptions& options) {
  return step(std::vector{inputs}, targets, options);
}
PipelineResult Pipeline::step(const std::vector<at::Tensor>& inputs, const at::Tensor& targets, const StepOptions& options) {
  return state_->run_tensors(inputs, targets, options, false);
}
PipelineResult Pipeline::evaluate(const std::vector<at::Tensor>& inputs, const at::Tensor& targets, const StepOptions& options) {
  return state_->run_tensors(inputs, targets, options, true);
}
PipelineResult Pipeline::run(PipelineBatch batch, bool forward_only) { return state_->run(batch.work, batch.micro_batches, forward_only); }

const std::vector<std::vector<at::Tensor>>& Pipeline::outputs() const { return state_->outputs; }
const std::shared_ptr<torch::nn::Module>& Pipeline::module() const { return state_->stages.module; }
const Stages& Pipeline::stages() const { return state_->stages; }
std::string Pipeline::counted_elsewhere() const { return state_->stages.counted_elsewhere(state_->comm.rank()); }
const Comm& Pipeline::comm() const { return state_->comm; }
const schedule::Schedule& Pipeline::schedule_of(int micro_batches, bool forward_only) { return state_->plan.of(micro_batches, forward_only).schedule; }
const parallel::ActionTimes& Pipeline::times() const { return state_->times; }

schedule::Times Pipeline::measured_times() {
  const auto stages = static_cast<int64_t>(state_->stages.owner.size());
  const at::Tensor sums = at::zeros({stages, 3, 2}, at::kDouble);  // F, I or B, W; seconds and count
  auto at = sums.accessor<double, 3>();
  for (const auto& [place, sum] : state_->totals.of) {
    const int column = place.second == Kind::forward ? 0 : place.second == Kind::weight_grad ? 2 : 1;
    at[place.first][column][0] += sum.seconds;
    at[place.first][column][1] += static_cast<double>(sum.count);
  }
  state_->totals = {};
  state_->comm.all_reduce(sums).released();
  schedule::Times times;
  for (int64_t s = 0; s < stages; ++s) {
    const auto mean = [&](int column) { return at[s][column][1] > 0 ? at[s][column][0] / at[s][column][1] : 0; };
    times.forward.push_back(mean(0));
    times.input_grad.push_back(mean(1));
    times.weight_grad.push_back(mean(2));
  }
  return times;
}

}  // namespace weft
