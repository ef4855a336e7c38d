// Model, data-parallel engine and optimizer of one rank.
#pragma once

#include <optional>

#include "weft/models/transformer.h"
#include "weft/optim/ema.h"
#include "weft/optim/loss_scaler.h"
#include "weft/optim/offload_options.h"
#include "weft/optim/optim.h"
#include "weft/parallel/data_parallel.h"
#include "weft/parallel/pipeline/pipeline.h"
#include "weft/train/job.h"
#include "weft/train/optimizer.h"

namespace weft::train {

struct StepResult {
  double loss_sum = 0;   ///< over the targets of this data-parallel rank; the same on its pipeline and tensor-parallel ranks
  double grad_norm = 0;  ///< global, before clipping
  bool skip = false;     ///< fp16: gradients overflowed on some rank and were dropped on all
  std::optional<double> bubble;  ///< share of the pipeline ranks' time outside of compute
};

/// Before the forward of pass `pass` of a step's `passes`: says what its backward reduces.
void start_pass(DataParallel& dp, int64_t pass, int64_t passes);

class Learner {
 public:
  /// Collective over the ranks of `axes`. On the meta device (a rehearsal) nothing is computed: the same tensors are
  /// made and freed, and losses and norms are 0.
  Learner(const Job& job, const Axes& axes, at::Device device = at::kCPU);
  Learner(const Learner&) = delete;  // the pipeline points at the engine
  Learner& operator=(const Learner&) = delete;

  /// Forward and backward over this rank's micro-batches of update number `update` (from 0), reduction and clipping.
  /// The loss of every target counts the same: sums are divided by the step's number of targets alone.
  StepResult accumulate(const data::TrainBatches& batches, int64_t update);
  /// Optimizer update with learning rate `rate`; drops the gradients.
  void apply(double rate);

  /// Of the next backward; empty but for fp16.
  std::optional<double> loss_scale() const { return scaler_ ? std::optional(scaler_->scale()) : std::nullopt; }

  /// What offloading has cost so far; empty when nothing is on a disk.
  std::optional<optim::OffloadUse> offload_use() const;
  /// Averaged weights; null without train.ema.
  optim::Ema* ema() { return ema_ ? &*ema_ : nullptr; }
  models::Transformer& model() { return model_; }
  /// Null without pipeline parallelism.
  Pipeline* pipeline() { return pipeline_ ? &*pipeline_ : nullptr; }
  DataParallel& data_parallel() { return dp_; }
  const DataParallel& data_parallel() const { return dp_; }

 private:
  void run_stages(const data::TrainBatches& batches, int64_t update, StepResult& result);
  void run_passes(const data::TrainBatches& batches, int64_t update, StepResult& result);

  at::Device device_;
  models::Transformer model_;
  std::optional<Stages> stages_;  // until the pipeline has them
  DataParallel dp_;
  std::optional<Pipeline> pipeline_;
  RunOptimizer optimizer_;
  int64_t global_batch_;
  double clip_norm_;
  std::optional<optim::LossScaler> scaler_;
  std::optional<optim::Ema> ema_;
};

}  // namespace weft::train
