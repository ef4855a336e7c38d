#include "weft/parallel/pipeline/executor.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <chrono>

#include "weft/core/cause.h"
#include "weft/core/error.h"
#include "weft/schedule/text.h"

namespace weft::parallel {
namespace {

using schedule::Action;
using schedule::Kind;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::vector<at::Tensor> without_graph(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& t : tensors) result.push_back(t.detach().requires_grad_(t.requires_grad()));
  return result;
}

}  // namespace

Executor::Executor(std::map<int, Stage>& stages, Comm comm, at::Device device, bool split)
    : stages_(stages), comm_(comm), links_(std::move(comm), device), put_off_(split ? std::make_shared<nn::WeightGradients>() : nullptr) {
  for (const auto& [number, stage] : stages_) {
    if (!stage.module) continue;
    for (const auto& module : stage.module->modules()) {
      if (auto* splits = dynamic_cast<nn::SplitsBackward*>(module.get())) splits->put_off_to(put_off_);
    }
  }
}

std::string Executor::place(const Action& action) const {
  const auto stage = stages_.find(action.stage);
  const std::string name = stage == stages_.end() || stage->second.name.empty() ? "" : " (" + stage->second.name + ")";
  return fmt::format("pipeline stage {}{} on rank {}, micro-batch {}, {}", action.stage, name, comm_.world_rank(comm_.rank()), action.micro_batch,
                     schedule::to_text(action, true));
}

void Executor::timed(const Action& action, const std::function<void()>& compute) {
  const auto start = Clock::now();
  compute();
  const double seconds = seconds_since(start);
  auto& sum = outcome_.times.of[{action.stage, action.kind}];
  sum.seconds += seconds;
  ++sum.count;
  outcome_.times.busy += seconds;
}

void Executor::forward(const Action& action, PipelineWork& work) {
  const auto m = static_cast<size_t>(action.micro_batch);
  Cell& c = cell(action.stage, action.micro_batch);
  if (action.stage == 0) {
    c.inputs = work.inputs.at(m);
  } else if (!is_mine(action.stage - 1)) {
    c.inputs = c.incoming.wait();
  }
  static const SideInputs none;
  const SideInputs& side = work.side.empty() ? none : work.side.at(m);
  timed(action, [&] {
    const at::AutoGradMode mode(!schedule_->forward_only);
    std::vector<at::Tensor> outputs = stages_.at(action.stage).forward(c.inputs, side);
    if (schedule_->is_last(action.stage)) {
      if (work.keep_outputs) outcome_.outputs.at(m) = outputs;
      if (!work.loss) return;
      const at::Tensor loss = work.loss(action.micro_batch, outputs);
      losses_.push_back(loss.detach());
      if (schedule_->forward_only) return;
      if (loss.numel() != 1 || !loss.requires_grad()) throw ConfigError("the loss must be one number that depends on parameters");
      c.roots.push_back(torch::autograd::impl::gradient_edge(loss));
      c.seeds.push_back(at::full_like(loss, work.gradient_scale, loss.options().requires_grad(false)));
      return;
    }
    c.output_shapes = shapes_of(outputs);
    for (const at::Tensor& t : outputs) {
      if (t.requires_grad()) c.roots.push_back(torch::autograd::impl::gradient_edge(t));
    }
    c.outputs = without_graph(outputs);
  });
  if (schedule_->forward_only) c.inputs.clear();
  if (schedule_->is_last(action.stage) || !is_mine(action.stage + 1)) return;
  cell(action.stage + 1, action.micro_batch).inputs = std::exchange(c.outputs, {});
}

/// B, or I: then the gradients of weights that can wait are put off.
void Executor::backward(const Action& action) {
  Cell& c = cell(action.stage, action.micro_batch);
  std::vector<at::Tensor> gradients;
  if (schedule_->is_last(action.stage)) {
    gradients = std::move(c.seeds);
  } else {
    gradients = is_mine(action.stage + 1) ? std::move(c.output_grads) : c.incoming_grads.wait();
  }
  timed(action, [&] {
    if (put_off_) put_off_->begin(key(action));
    if (!c.roots.empty()) {
      torch::autograd::Engine::get_default_engine().execute(c.roots, gradients, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true);
    }
    if (put_off_ && action.kind == Kind::backward) put_off_->run(key(action));
  });
  for (const at::Tensor& x : c.inputs) {
    if (action.stage == 0 || !x.requires_grad()) continue;
    c.input_grads.push_back(x.grad().defined() ? x.grad() : at::zeros_like(x, x.options().requires_grad(false)));
  }
  c.roots.clear();
  c.inputs.clear();
  if (action.stage > 0 && is_mine(action.stage - 1)) cell(action.stage - 1, action.micro_batch).output_grads = std::move(c.input_grads);
}

void Executor::carry_out(const Action& action, PipelineWork& work) {
  switch (action.kind) {
    case Kind::forward: return forward(action, work);
    case Kind::backward:
    case Kind::input_grad: return backward(action);
    case Kind::weight_grad:
      if (put_off_) timed(action, [&] { put_off_->run(key(action)); });
      return;
    case Kind::send_activation:
      links_.send_activation(action.stage, action.micro_batch, std::exchange(cell(action.stage, action.micro_batch).outputs, {}), owner(action.stage + 1));
      return;
    case Kind::recv_activation:
      cell(action.stage, action.micro_batch).incoming = links_.recv_activation(action.stage, action.micro_batch, owner(action.stage - 1));
      return;
    case Kind::send_grad:
      links_.send_grad(std::exchange(cell(action.stage, action.micro_batch).input_grads, {}), owner(action.stage - 1));
      return;
    case Kind::recv_grad: {
      Cell& c = cell(action.stage, action.micro_batch);
      c.incoming_grads = links_.recv_grad(c.output_shapes, owner(action.stage + 1));
      return;
    }
    case Kind::unshard:
    case Kind::reshard:
    case Kind::reduce:
      if (work.on_stage_action) work.on_stage_action(action.kind, action.stage);
      return;
  }
}

PipelineOutcome Executor::run(const schedule::Schedule& schedule, PipelineWork& work) {
  schedule_ = &schedule;
  cells_.clear();
  losses_.clear();
  if (put_off_) put_off_->clear();
  outcome_ = {};
  if (work.keep_outputs) outcome_.outputs.resize(static_cast<size_t>(schedule.micro_batches));
  links_.begin(schedule.forward_only, work.learn_shapes);
  const auto start = Clock::now();
  for (const Action& action : schedule.ranks[static_cast<size_t>(comm_.rank())]) {
    try {
      carry_out(action, work);
    } catch (const CommError&) {
      throw;
    } catch (const std::exception& error) {
      throw ConfigError(place(action) + ": " + cause_text(error.what()));
    }
    links_.progress();
  }
  links_.finish();
  outcome_.times.elapsed = seconds_since(start);
  cells_.clear();
  for (const at::Tensor& loss : losses_) outcome_.loss += loss.item<double>();
  return std::move(outcome_);
}

}  // namespace weft::parallel
