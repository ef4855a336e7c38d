#include "weft/parallel/round_engine.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/graph_task.h>

#include <exception>

#include "weft/autograd/backward_end.h"
#include "weft/core/error.h"
#include "weft/core/log.h"
#include "weft/core/pattern.h"
#include "weft/parallel/buffers.h"
#include "weft/parallel/gradient_norm.h"

namespace weft::parallel {

/// Shared by the callbacks that wait for the end of one backward, nested ones included.
struct RoundEngine::BackwardEnd {
  explicit BackwardEnd(std::weak_ptr<RoundEngine> engine) : owner(std::move(engine)) {}
  BackwardEnd(const BackwardEnd&) = delete;
  BackwardEnd& operator=(const BackwardEnd&) = delete;
  ~BackwardEnd() {
    if (auto self = owner.lock(); self && !done) self->backward_is_gone();
  }
  std::weak_ptr<RoundEngine> owner;
  bool done = false;
};

RoundEngine::RoundEngine(Comm comm, DataParallelOptions options, std::vector<NamedTensor> buffers)
    : comm_(std::move(comm)), options_(std::move(options)), buffers_(std::move(buffers)) {}

void RoundEngine::set_parameters(std::vector<NamedTensor> all) {
  for (NamedTensor& p : all) (p.tensor.requires_grad() ? parameters_ : frozen_).push_back(std::move(p));
  tensor_ = tensor_ranks_of(parameters_);
  if (options_.counted_elsewhere.empty()) return;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (matches(options_.counted_elsewhere, parameters_[i].name)) tensor_.counted[i] = false;
  }
}

void RoundEngine::visit_full(const std::function<void(const at::Tensor&)>& visit) {
  settle();
  for (const auto* list : {&parameters_, &frozen_}) {
    for (const NamedTensor& p : *list) visit(p.tensor);
  }
}

void RoundEngine::write_shards(const std::function<void()>& write) {
  settle();
  write();
}

void RoundEngine::on_gradient(size_t group, size_t slot) {
  settle();
  enter_backward(&parameter_at(group, slot));
  try {
    if (sync_ && !open_) {
      open_round();
      check_can_add();
    }
    land(group, slot);
  } catch (const ConfigError& error) {
    found_ = error.what();  // the peers will want to know
    throw;
  }
  comm_.progress();
}

std::function<void()> RoundEngine::begin_callback() {
  return [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->backward_begins();
  };
}

void RoundEngine::backward_begins() {
  // autograd::grad() of the loss is a part of the forward.
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted != nullptr && !wanted->empty()) return;
  settle();
  enter_backward();
}

void RoundEngine::enter_backward(const at::Tensor* landing) {
  const int task = torch::autograd::get_current_graph_task_id();
  if (std::exchange(anchored_task_, task) == task) return;
  std::shared_ptr<BackwardEnd> end = backward_end_.lock();
  const bool first = end == nullptr;
  if (first) backward_end_ = end = std::make_shared<BackwardEnd>(weak_from_this());
  autograd::at_backward_end([end] {
    end->done = true;
    if (auto self = end->owner.lock()) self->backward_ended();
  });
  if (!first) return;
  std::vector<std::string> names;
  try {
    names = adopt_foreign(landing);
  } catch (const ConfigError& error) {
    found_ = error.what();
    throw;
  }
  if (names.empty() || std::exchange(told_foreign_, true)) return;
  log(LogLevel::note, fmt::format("the gradient of parameter '{}'{} was put in place by the program. It is copied into Weft's buffers "
                                  "and counts; the tensor itself is not updated any more (said once)",
                                  names.front(), names.size() > 1 ? fmt::format(" and of {} more", names.size() - 1) : ""));
}

void RoundEngine::backward_ended() {
  anchored_task_ = -1;
  open_ ? finish() : complete_passes();
}

/// No communication here. The gradients go at once, so that the next backward's land beside the flat buffers, which may be in
/// flight.
void RoundEngine::backward_is_gone() {
  anchored_task_ = -1;
  failed_ = true;
  if (!open_) open_round();
  zero_grad();
}

/// A nested backward's callbacks may stay with the graph that contains it, whatever became of it.
void RoundEngine::notice_backward_that_is_gone() {
  if (torch::autograd::get_current_graph_task_id() != -1) return;
  if (const auto end = backward_end_.lock(); end && !std::exchange(end->done, true)) backward_is_gone();
}

void RoundEngine::open_round() {
  open_ = true;
  ++round_;
  begin_groups();
}

StepFault RoundEngine::take_fault() {
  if (std::exchange(failed_, false)) return {StepFault::Kind::threw, std::exchange(found_, {})};
  found_.clear();
  std::string text = find_refrozen(parameters_, frozen_);
  if (text.empty()) text = find_moved();
  return {text.empty() ? StepFault::Kind::none : StepFault::Kind::rule, text};
}

void RoundEngine::finish() {
  notice_backward_that_is_gone();
  if (!open_) return;
  open_ = false;  // first: after a failure the round is over, whoever retries gets the group's error
  StepFault fault = take_fault();
  std::exception_ptr own;
  if (!fault) {
    try {
      launch_rest();
    } catch (const CommError&) {
      throw;
    } catch (const ConfigError& error) {
      fault = {StepFault::Kind::rule, error.what()};
    } catch (const std::exception& error) {  // of a reduce hook
      own = std::current_exception();
      fault = {StepFault::Kind::threw, error.what()};
    }
  }
  if (fault) launch_rest_failed();
  const bool good = close(static_cast<bool>(fault));
  if (agree_on_step(good, fault, tensor_.comm)) {
    present();
    return synchronise_buffers(buffers_, options_.buffers, comm_);
  }
  // A rank whose backward threw has forgotten them; grad() may hold the next backward's already.
  if (fault.kind != StepFault::Kind::threw || own) zero_grad();
  throw_step_fault(fault, round_ - 1, comm_);
  if (own) std::rethrow_exception(own);
}

void RoundEngine::settle() {
  notice_backward_that_is_gone();
  if (failed_) finish();
}

void RoundEngine::join_without_batch() {
  notice_backward_that_is_gone();
  if (failed_) return finish();  // that round is the step which the peers are in
  if (!sync_) return complete_passes();
  if (parameters_.empty()) return;
  if (!open_) open_round();
  finish();
}

double RoundEngine::grad_norm(double norm_type) {
  finish();
  const double norm = gradient_norm(shards(), tensor_.counted, norm_type, {norm_comm(), tensor_.comm, options_.stages});
  check_norm(norm);
  return norm;
}

double RoundEngine::clip_grad_norm(double max_norm, double norm_type) {
  const double norm = grad_norm(norm_type);
  clip_gradients(shards(), max_norm, norm);
  return norm;
}

void RoundEngine::zero_grad() {
  drop_local();
  drop_reduced();
}

}  // namespace weft::parallel
