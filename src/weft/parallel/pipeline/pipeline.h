// Pipeline: trains a model whose stages lie on different ranks, by a schedule that is data.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "weft/comm/comm.h"
#include "weft/parallel/data_parallel.h"
#include "weft/parallel/pipeline/executor.h"
#include "weft/parallel/pipeline/stage.h"
#include "weft/schedule/generate.h"
#include "weft/schedule/timeline.h"

namespace weft {

/// Schedules with I and W (zero bubble) need modules whose backward splits: weft::Split<torch::nn::Linear> and Weft's own layers. Embeddings and
/// parameters of one dim may be there, too; their gradients come with I.
enum class Unsplit {
  refuse,      ///< ConfigError that names the first module with a weight matrix that does not split
  with_input   ///< its weight gradients are computed in I: right, but the schedule's W is shorter and its I longer than planned
};

struct PipelineOptions {
  Unsplit unsplit = Unsplit::refuse;
  /// Sharding::parameters: of this rank's stages so many are gathered at a time (UNSHARD, RESHARD); 0: all, from their first use to their last.
  int whole_stages = 0;
};

struct StepOptions {
  int micro_batches = 1;
  /// 0: loss_fn returns the mean over the rows (dim 0) of a micro-batch, and the step's loss is the mean over all rows. Else loss_fn returns a
  /// sum, and the step's loss is the sum of them divided by `count`, one number for all data-parallel ranks together.
  int64_t count = 0;
  SideInputs side;       ///< all rows; each stage gets its micro-batch's. The same names on every rank
  bool outputs = false;  ///< return the last stage's outputs
};

struct PipelineResult {
  double loss = 0;                   ///< of the whole step, the same on every rank of the pipeline (and of the attached DataParallel)
  std::vector<at::Tensor> outputs;   ///< on the rank of the last stage, if asked: all rows
  double bubble = 0;                 ///< share of the ranks' time outside of compute, measured
};

/// Micro-batch by micro-batch, for programs whose batches are no tensors that are cut along dim 0.
struct PipelineBatch {
  int micro_batches = 1;
  parallel::PipelineWork work;  ///< inputs, side, loss, gradient_scale, keep_outputs
};

/// Runs Stages over the ranks of `comm`. All ranks call the same functions with the same options; inputs are looked at on the rank of
/// stage 0, targets on that of the last stage.
///
///   auto stages = weft::cut(sequential, mesh["pp"], {.chunks = 2});
///   weft::Pipeline pipe(std::move(stages), weft::schedule::interleaved(), mesh["pp"], loss_fn);
///   auto result = pipe.step(inputs, targets, {.micro_batches = 8});
///
/// step() adds to the gradients of the local stages' parameters, as backward() does; call it several times to accumulate. Gradients of
/// tied parameters are the sum over the stages, the same on all of them. Modules built under weft::deferred get memory.
///
/// Errors: ConfigError before any communication of activations when ranks disagree (micro-batches, schedule), when a schedule is not valid or
/// places stages elsewhere than `stages` do, for more micro-batches than rows, and for modules that do not split. What a stage throws becomes a
/// ConfigError with stage, rank and micro-batch, which ends the calls of all ranks of the world: a half-done step cannot be taken back.
class Pipeline {
 public:
  /// Mean or sum over a micro-batch's rows (StepOptions::count) from the last stage's first output and the targets.
  using LossFn = std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)>;

  Pipeline(Stages stages, schedule::Maker schedule, Comm comm, LossFn loss_fn = {}, PipelineOptions options = {});
  ~Pipeline();
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) noexcept;

  /// Gradients of every step from here on are reduced by `dp`, which wraps module() over the ranks with the same stages, once per step after the
  /// last weight gradient. Its options have .stages = comm and .counted_elsewhere = counted_elsewhere(). `dp` lives longer than the calls here.
  void reduce_with(DataParallel& dp);
  /// false: the following steps only accumulate; true (default): the next one reduces, and sums tied gradients.
  void sync(bool on);

  PipelineResult step(const at::Tensor& inputs, const at::Tensor& targets, const StepOptions& options = {});
  PipelineResult step(const std::vector<at::Tensor>& inputs, const at::Tensor& targets, const StepOptions& options = {});
  /// Forward only, without gradients; modules' training mode is the caller's.
  PipelineResult evaluate(const std::vector<at::Tensor>& inputs, const at::Tensor& targets, const StepOptions& options = {});

  /// The same for other batches. The loss is not divided by anything; of PipelineResult::outputs there are none.
  PipelineResult run(PipelineBatch batch, bool forward_only = false);
  /// Outputs of the last call of run() with keep_outputs, by micro-batch.
  const std::vector<std::vector<at::Tensor>>& outputs() const;

  /// Holds the local stages' parameters under their names in the whole model.
  const std::shared_ptr<torch::nn::Module>& module() const;
  const Stages& stages() const;
  std::string counted_elsewhere() const;
  const Comm& comm() const;

  /// The schedule that a step of so many micro-batches runs, with its communication.
  const schedule::Schedule& schedule_of(int micro_batches, bool forward_only = false);
  /// Times of the last step's actions on this rank.
  const parallel::ActionTimes& times() const;
  /// Mean seconds of F, I, W and B of every stage in all steps since the last call, from all ranks, for schedule::run(). Collective. An unsplit B
  /// counts as I.
  schedule::Times measured_times();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace weft
