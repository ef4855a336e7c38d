#include "weft/train/learner.h"

#include "weft/memory/cpu_allocator.h"
#include "weft/nn/activations.h"
#include "weft/parallel/flat_view.h"
#include "weft/parallel/gradient_hook.h"
#include "weft/train/layout_text.h"
#include "weft/train/stages.h"

namespace weft::train {
namespace {

using memory::Category;

models::Transformer make_model(const Job& job, const Axes& axes, at::Device device) {
  const memory::Scope scope(Category::parameters);
  models::TransformerOptions options;
  // No rank holds the whole model before it is sharded.
  options.deferred = job.config.parallel.zero > 0 && axes.dp.size() > 1 && !device.is_meta();
  options.dtype = job.dtype;
  options.device = device;
  options.tp = axes.tp;
  if (axes.pp.size() > 1) options.parts = stage_plan(job).of_rank(axes.pp.rank());
  options.seed = static_cast<uint64_t>(job.config.train.seed);
  return models::Transformer(job.spec, options);
}

std::optional<Stages> make_stages(models::Transformer& model, const Job& job, const Axes& axes) {
  if (axes.pp.size() == 1) return std::nullopt;
  const StagePlan plan = stage_plan(job);
  return models::stages_of(model, plan.parts, plan.owner, axes.pp.rank());
}

void set_activations(models::Transformer& model, const config::TrainConfig& c) {
  // A stage of embedding or head alone has no blocks.
  if (std::none_of(model->layers.begin(), model->layers.end(), [](const auto& block) { return static_cast<bool>(block); })) return;
  constexpr const char* kBlocks = "layers.*";
  if (c.recompute != "none") set_recompute(model, {.mode = recompute_of_name(c.recompute), .every = c.recompute_every, .units = kBlocks});
  if (c.offload_activations) offload_activations(model, kBlocks);
}

DataParallelOptions dp_options(const Job& job) {
  constexpr double kMiB = 1 << 20;
  DataParallelOptions options;
  // The loss is divided by one global count, so that gradients of ranks add up.
  options.grad_scale = GradScale::sum;
  set_sharding(job.config.parallel, options);
  options.offload_parameters = job.config.offload.parameters == "cpu";
  if (gradient_type(job) != job.dtype) options.gradient_dtype = gradient_type(job);
  const std::string& reduce = job.config.train.reduce_dtype;
  if (reduce != "auto" && scalar_type(reduce) != gradient_type(job)) options.reduce_dtype = scalar_type(reduce);
  options.granules = granules_of(job.config.optimizer);
  options.bucket.bytes = static_cast<int64_t>(job.config.layout.bucket_mb * kMiB);
  options.bucket.last_bytes = static_cast<int64_t>(job.config.layout.last_bucket_mb * kMiB);
  return options;
}

/// The flat buffers that it makes are gradients, and parameters, which are told apart afterwards.
DataParallel make_data_parallel(models::Transformer& model, const Axes& axes, const Job& job, const std::optional<Stages>& stages) {
  const Comm& comm = axes.dp;
  const memory::Scope scope(Category::gradients);
  DataParallelOptions options = dp_options(job);
  options.stages = axes.pp;
  if (stages) options.counted_elsewhere = stages->counted_elsewhere(axes.pp.rank());
  DataParallel dp(model.ptr(), comm, options);
  // Sharded ones are booked where they are made, and may be released by now.
  if (dp.options().sharding != Sharding::none && comm.size() > 1) return dp;
  for (const NamedTensor& p : dp.parameters()) memory::rebook(p.tensor, Category::parameters);
  return dp;
}

/// One rank without a gradient dtype has no gradient buffers: autograd allocates each gradient while activations are counted.
void book_own_gradients(const DataParallel& dp) {
  if (dp.comm().size() > 1 || dp.options().gradient_dtype) return;
  for (const NamedTensor& p : dp.parameters()) {
    const auto book = [parameter = p.tensor.unsafeGetTensorImpl()] {
      memory::rebook(at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(parameter)).grad(), Category::gradients);
    };
    parallel::watch_gradient(p.tensor, p.name, book);
  }
}

/// Last of all settings of the optimizer.
void offload(torch::optim::Optimizer& optimizer, const config::OffloadConfig& c, int rank) {
  if (c.optimizer == "none") return;
  auto* elementwise = dynamic_cast<optim::ElementwiseOptimizer*>(&optimizer);
  if (elementwise == nullptr) throw InternalError("config::check lets an optimizer pass that cannot be offloaded");
  constexpr double kMiB = 1 << 20;
  elementwise->offload({.to = c.optimizer == "cpu" ? optim::OffloadOptions::To::cpu : optim::OffloadOptions::To::nvme,
                        .dir = c.dir,
                        .buffer_bytes = static_cast<int64_t>(c.buffer_mb * kMiB),
                        .buffers = c.buffers,
                        .what = "the optimizer's state of rank " + std::to_string(rank)});
}

}  // namespace

Learner::Learner(const Job& job, const Axes& axes, at::Device device)
    : device_(device),
      model_(make_model(job, axes, device)),
      stages_(make_stages(model_, job, axes)),
      dp_(make_data_parallel(model_, axes, job, stages_)),
      optimizer_(make_optimizer(job.config.optimizer, dp_)),
      global_batch_(job.config.train.global_batch),
      clip_norm_(job.config.optimizer.clip_norm) {
  if (stages_) {
    pipeline_.emplace(std::move(*stages_), stage_plan(job).maker, axes.pp);
    pipeline_->reduce_with(dp_);
    stages_.reset();
  }
  book_own_gradients(dp_);
  offload(*optimizer_.optimizer, job.config.offload, axes.world.rank());
  set_activations(model_, job.config.train);
  const auto& c = job.config.train;
  if (job.dtype == at::kHalf) scaler_.emplace(optim::LossScalerOptions{.initial = c.loss_scale, .growth_interval = c.loss_scale_interval});
  if (c.ema > 0) ema_.emplace(dp_, optim::EmaOptions{.decay = c.ema, .warmup = c.ema_warmup});
}

void start_pass(DataParallel& dp, int64_t pass, int64_t passes) {
  const bool last = pass + 1 == passes;
  // Full gradients that wait for the last pass are what zero = 2 and 3 are there to avoid.
  const bool reduce_every_pass = dp.options().sharding >= Sharding::gradients && dp.comm().size() > 1;
  dp.sync(reduce_every_pass || last);
  if (!reduce_every_pass) return;
  dp.sync_replicas(last);
  if (pass > 0) dp.continue_accumulation();
}

void Learner::run_passes(const data::TrainBatches& batches, int64_t update, StepResult& result) {
  const int64_t passes = batches.accumulation();
  for (int64_t pass = 0; pass < passes; ++pass) {
    const memory::Scope scope(Category::activations);
    data::Batch batch = batches.at(update * global_batch_, pass);
    batch.inputs = batch.inputs.to(device_);
    batch.targets = batch.targets.to(device_);
    start_pass(dp_, pass, passes);
    const nn::TokenPlace place{.step = update, .first_sample = batch.first_sample};
    const nn::LossSum loss = model_->loss_sum(batch.inputs, batch.targets, models::kIgnoreIndex, place);
    const at::Tensor mean = scale_loss(loss.sum, batches.tokens_per_step(), dp_);
    (scaler_ ? scaler_->scale(mean) : mean).backward();
    result.loss_sum += parallel::number_of(loss.sum);
  }
}

/// One reduction per step: micro-batches of several stages are in flight at a time.
void Learner::run_stages(const data::TrainBatches& batches, int64_t update, StepResult& result) {
  const memory::Scope scope(Category::activations);
  std::vector<data::Batch> list;
  for (int64_t pass = 0; pass < batches.accumulation(); ++pass) list.push_back(batches.at(update * global_batch_, pass));
  result.loss_sum = run_pipeline(*pipeline_, model_, list, batches.tokens_per_step(), update, scaler_ ? scaler_->scale() : 1.0, result.bubble);
}

StepResult Learner::accumulate(const data::TrainBatches& batches, int64_t update) {
  StepResult result;
  pipeline_ ? run_stages(batches, update, result) : run_passes(batches, update, result);
  result.skip = scaler_ && !scaler_->unscale(dp_);
  if (result.skip) return result;
  result.grad_norm = clip_norm_ > 0 ? dp_.clip_grad_norm(clip_norm_) : dp_.grad_norm();
  return result;
}

std::optional<optim::OffloadUse> Learner::offload_use() const {
  const auto* elementwise = dynamic_cast<const optim::ElementwiseOptimizer*>(optimizer_.optimizer.get());
  return elementwise == nullptr ? std::nullopt : elementwise->offload_use();
}

void Learner::apply(double rate) {
  optim::set_learning_rate(*optimizer_.optimizer, rate, optimizer_.shares);
  optimizer_.optimizer->step();
  if (ema_) ema_->update();
  dp_.zero_grad();
}

}  // namespace weft::train
