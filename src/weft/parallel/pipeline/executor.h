// The one place where schedule actions are carried out.
#pragma once

#include <torch/csrc/autograd/edge.h>

#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "weft/nn/weight_gradients.h"
#include "weft/parallel/pipeline/links.h"
#include "weft/parallel/pipeline/stage.h"
#include "weft/schedule/action.h"

namespace weft::parallel {

/// What one call works on. Ranks give what their stages need.
struct PipelineWork {
  std::vector<std::vector<at::Tensor>> inputs;  ///< of stage 0, by micro-batch
  std::vector<SideInputs> side;                 ///< by micro-batch; empty: none
  /// Of the last stage's outputs: a micro-batch's share of the step's loss, so that shares add up to it.
  std::function<at::Tensor(int micro_batch, const std::vector<at::Tensor>& outputs)> loss;
  double gradient_scale = 1;  ///< gradients are those of the loss times this
  bool keep_outputs = false;
  bool learn_shapes = false;  ///< equal on all ranks
  /// What UNSHARD, RESHARD and REDUCE do; null: nothing.
  std::function<void(schedule::Kind, int stage)> on_stage_action;
};

/// Time of this rank's actions, in seconds.
struct ActionTimes {
  struct Sum {
    double seconds = 0;
    int64_t count = 0;
  };
  std::map<std::pair<int, schedule::Kind>, Sum> of;  ///< by stage and kind
  double busy = 0;                                   ///< in compute actions
  double elapsed = 0;                                ///< from the first action to the last
};

struct PipelineOutcome {
  double loss = 0;                               ///< on the rank of the last stage, else 0
  std::vector<std::vector<at::Tensor>> outputs;  ///< of the last stage, by micro-batch, if asked
  ActionTimes times;
};

/// Carries out a rank's list of one schedule. Activations of a micro-batch live from its F to its B or I (what its weight gradients need: to W);
/// a stage's outputs until they are sent. An exception in a stage becomes a ConfigError that names stage and micro-batch.
class Executor {
 public:
  /// split: the schedules have I and W; modules that can put weight gradients off do so.
  Executor(std::map<int, Stage>& stages, Comm comm, at::Device device, bool split);

  PipelineOutcome run(const schedule::Schedule& schedule, PipelineWork& work);

 private:
  /// One micro-batch in one stage.
  struct Cell {
    Incoming incoming, incoming_grads;
    std::vector<at::Tensor> inputs;        // leaves of this stage's graph
    std::vector<at::Tensor> outputs;       // without graph, until they are sent
    Shapes output_shapes;
    torch::autograd::edge_list roots;      // where backward begins
    std::vector<at::Tensor> seeds;         // of the last stage: gradient of the loss
    std::vector<at::Tensor> output_grads;  // that came
    std::vector<at::Tensor> input_grads;   // to be sent
  };

  void carry_out(const schedule::Action& action, PipelineWork& work);
  void forward(const schedule::Action& action, PipelineWork& work);
  void backward(const schedule::Action& action);
  void timed(const schedule::Action& action, const std::function<void()>& compute);
  Cell& cell(int stage, int micro_batch) { return cells_[{stage, micro_batch}]; }
  int owner(int stage) const { return schedule_->owner[static_cast<size_t>(stage)]; }
  bool is_mine(int stage) const { return owner(stage) == comm_.rank(); }
  int64_t key(const schedule::Action& a) const { return int64_t{a.stage} * schedule_->micro_batches + a.micro_batch; }
  std::string place(const schedule::Action& action) const;

  std::map<int, Stage>& stages_;
  Comm comm_;
  Links links_;
  std::shared_ptr<nn::WeightGradients> put_off_;  // null: backward is whole
  const schedule::Schedule* schedule_ = nullptr;
  std::map<std::pair<int, int>, Cell> cells_;
  std::vector<at::Tensor> losses_;
  PipelineOutcome outcome_;
};

}  // namespace weft::parallel
