#include "weft/parallel/sharded_engine.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include "weft/autograd/backward_end.h"
#include "weft/core/error.h"
#include "weft/nn/start_values.h"
#include "weft/parallel/agreement.h"
#include "weft/parallel/buffers.h"
#include "weft/parallel/data_axes.h"
#include "weft/parallel/gradient_hook.h"
#include "weft/parallel/option_check.h"
#include "weft/parallel/shard_owner.h"
#include "weft/parallel/sharding_plan.h"
#include "weft/parallel/unit_gathers.h"

namespace weft::parallel {
namespace {

/// A round is one reduction of all gradients, as in the replicated engine: it opens with the first gradient that lands while
/// sync is on and closes in finish(). Groups are reduce-scattered in their fixed order, each when it and all before it are
/// complete. finish() then agrees in one small all_reduce on which parameters were used and whether a backward threw.
/// Gathers and reductions go through Comms of their own (DataAxes): the order within each is fixed, that between them is not.
class ShardedEngine final : public Engine, public std::enable_shared_from_this<ShardedEngine> {
 public:
  ShardedEngine(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers, const std::vector<UnitSpec>& units, Comm comm,
                DataParallelOptions options)
      : comm_(std::move(comm)),
        options_(std::move(options)),
        op_(options_.grad_scale == GradScale::sum ? ReduceOp::sum : ReduceOp::avg),
        buffers_(std::move(buffers)) {
    if (options_.reduce_hook) {
      throw ConfigError("reduce_hook changes how gradients are all-reduced, and under Sharding::optimizer and above they are "
                        "reduce-scattered. Use reduce_dtype, or Sharding::none");
    }
    ShardingPlan plan = plan_sharding(std::move(parameters), units, options_);
    check_same_model(plan.all, buffers_, options_, comm_);
    axes_ = make_data_axes(comm_, options_.dp_shard, near_groups(plan));
    build(plan);
    for (NamedTensor& t : plan.untouched) {
      nn::materialise(t.tensor);
      broadcast_tensor(t.tensor, comm_);
    }
    for (NamedTensor& t : buffers_) broadcast_tensor(t.tensor, comm_);
  }

  ~ShardedEngine() override {
    for (const NamedTensor& p : parameters_) unwatch_gradient(p.tensor);
  }

  void watch() override;
  void sync(bool on) override { sync_ = on; }

  void finish() override {
    if (!open_) return;
    open_ = false;
    const bool failed_here = std::exchange(failed_, false);
    if (failed_here) drop_gradients();
    launch_up_to(trainable_.size());
    gathers_->end_backward();
    const std::vector<float> used = agree(failed_here);
    for (FlatGroup* group : trainable_) group->start_across_replicas();
    for (FlatGroup* group : trainable_) group->collect();
    for (const auto& group : groups_) group->settle();
    mark_stale();
    if (used.back() > 0) return fail_round(failed_here);
    size_t at = 0;
    for (FlatGroup* group : trainable_) {
      group->present(used.data() + at);
      at += group->slots().size();
    }
    synchronise_buffers(buffers_, options_.buffers, comm_);
  }

  void settle() override {
    if (failed_) finish();
  }

  void join_without_batch() override {
    settle();
    if (!open_) open_round();
    gathers_->begin_without_use();
    finish();
  }

  double grad_norm(double norm_type) override;
  double clip_grad_norm(double max_norm, double norm_type) override;
  void zero_grad() override { drop_gradients(); }

  const std::vector<NamedTensor>& parameters() const override { return parameters_; }
  const std::vector<NamedTensor>& shards() const override { return shards_; }
  const Comm& comm() const override { return comm_; }
  const DataParallelOptions& options() const override { return options_; }

  std::map<std::string, TrafficCount> traffic() const override { return traffic_of(axes_); }

  void refresh() override {
    if (!std::exchange(stale_, false)) return;
    for (const auto& group : groups_) group->drop_near();
    for (FlatGroup* group : whole_) group->start_gather();
    for (FlatGroup* group : whole_) group->finish_gather();
  }

  void continue_accumulation() override {
    if (!std::exchange(stale_, false)) return;
    for (FlatGroup* group : whole_) group->set_current();
  }

  std::vector<size_t> hold_full(const std::string& names) override {
    settle();
    refresh();
    return gathers_->hold(names);
  }
  void end_full(const std::vector<size_t>& units) override { gathers_->let_go(units); }

  UnitGathers& gathers() { return *gathers_; }
  void before_forward() {
    settle();
    // A backward without a round (sync off) that threw has left its pass open.
    if (torch::autograd::get_current_graph_task_id() == -1 && gathers_->in_backward()) gathers_->end_backward();
  }
  /// The end of the backward that runs closes the round, or releases what this backward gathered.
  void act_at_backward_end();

 private:
  void build(ShardingPlan& plan);
  void on_gradient(size_t group, size_t slot);
  void on_updated(size_t shard);

  void open_round() {
    open_ = true;
    next_ = 0;
    for (FlatGroup* group : trainable_) group->open_round();
  }

  void mark_stale() {
    for (const auto& group : groups_) group->set_stale();
    stale_ = true;
    updated_.clear();
  }

  void launch_up_to(size_t end) {
    for (; next_ < end; ++next_) trainable_[next_]->launch(*pool_, op_);
  }

  void drop_gradients() {
    for (FlatGroup* group : trainable_) group->drop_gradients();
  }

  std::vector<float> agree(bool failed_here);
  void fail_round(bool failed_here);

  /// Shared by the callbacks that wait for the end of one backward. If backward throws, they are dropped unrun.
  struct BackwardEnd {
    explicit BackwardEnd(std::weak_ptr<ShardedEngine> engine) : owner(std::move(engine)) {}
    BackwardEnd(const BackwardEnd&) = delete;
    BackwardEnd& operator=(const BackwardEnd&) = delete;
    std::weak_ptr<ShardedEngine> owner;
    bool done = false;
    ~BackwardEnd() {
      if (auto self = owner.lock(); self && !done) self->failed_ = self->failed_ || self->open_;
    }
  };

  Comm comm_;
  DataAxes axes_;
  DataParallelOptions options_;
  ReduceOp op_;
  std::vector<NamedTensor> parameters_, shards_, buffers_;
  std::vector<std::unique_ptr<FlatGroup>> groups_;
  std::vector<FlatGroup*> trainable_;     // in the order of their reductions
  std::vector<int64_t> unit_of_;          // of trainable_; -1 outside of Units
  std::vector<FlatGroup*> whole_;         // gathered by refresh()
  std::unique_ptr<UnitGathers> gathers_;
  std::unique_ptr<GradientPool> pool_;
  std::vector<nn::UnitBase*> unit_modules_;
  std::vector<std::shared_ptr<nn::UnitHooks>> hooks_;
  bool sync_ = true;
  bool open_ = false;
  bool failed_ = false;
  bool stale_ = false;                    // whole groups are out of date
  std::unordered_set<size_t> updated_;    // shards that Weft's optimizers have written since
  size_t next_ = 0;
  std::weak_ptr<BackwardEnd> backward_end_;
  int anchored_task_ = -1;
};

/// Tells the engine about one Unit's calls.
class Hooks final : public nn::UnitHooks {
 public:
  Hooks(std::weak_ptr<ShardedEngine> engine, size_t unit) : engine_(std::move(engine)), unit_(unit) {}

  void before_forward() override {
    auto engine = engine_.lock();
    if (!engine) return;
    engine->before_forward();
    engine->gathers().begin_forward(unit_);
  }

  void after_forward(const std::vector<at::Tensor>& outputs) override {
    auto engine = engine_.lock();
    if (!engine) return;
    engine->gathers().end_forward(unit_);
    for (const at::Tensor& output : outputs) {
      if (!output.requires_grad()) continue;
      output.register_hook([engine = engine_, unit = unit_](const at::Tensor&) {
        if (auto self = engine.lock()) {
          self->act_at_backward_end();
          self->gathers().begin_backward(unit);
        }
      });
    }
  }

 private:
  std::weak_ptr<ShardedEngine> engine_;
  size_t unit_;
};

void ShardedEngine::build(ShardingPlan& plan) {
  std::vector<ShardedUnit> units(plan.units.size());
  for (size_t u = 0; u < units.size(); ++u) {
    units[u].name = plan.units[u];
    units[u].reshard_after_forward = settings_of(plan.units[u], options_).reshard.after_forward();
  }
  std::unordered_map<const void*, at::Tensor> shard_of;
  int64_t largest = 0;
  for (PlannedGroup& planned : plan.groups) {
    groups_.push_back(std::make_unique<FlatGroup>(planned.plan, planned.parameters, axes_));
    FlatGroup* group = groups_.back().get();
    group->release();  // before the next is made: together they would be the whole model
    largest = std::max(largest, group->gradient_bytes());
    if (planned.plan.residence == Residence::whole) whole_.push_back(group);
    if (planned.unit >= 0) {
      ShardedUnit& unit = units[static_cast<size_t>(planned.unit)];
      unit.groups.push_back(group);
      unit.trainable += planned.plan.trainable ? static_cast<int64_t>(group->slots().size()) : 0;
      unit.frozen = unit.frozen || !planned.plan.trainable;
    }
    if (!planned.plan.trainable) continue;
    trainable_.push_back(group);
    unit_of_.push_back(planned.unit);
    for (const FlatSlot& slot : group->slots()) shard_of.emplace(slot.parameter.unsafeGetTensorImpl(), slot.shard);
  }
  // The peers' buffers of one group are read while the next group fills its own, and a third is ready early.
  constexpr size_t kPooledBuffers = 3;
  pool_ = std::make_unique<GradientPool>(static_cast<int>(std::min(kPooledBuffers, trainable_.size())), largest, axes_.shard);
  for (NamedTensor& p : plan.all) {
    if (!p.tensor.requires_grad()) continue;
    shards_.push_back({p.name, shard_of.at(p.tensor.unsafeGetTensorImpl())});
    parameters_.push_back(p);
  }
  gathers_ = std::make_unique<UnitGathers>(std::move(units), options_.prefetch);
  unit_modules_ = plan.unit_modules;
}

void ShardedEngine::watch() {
  for (size_t g = 0; g < trainable_.size(); ++g) {
    for (size_t s = 0; s < trainable_[g]->slots().size(); ++s) {
      const FlatSlot& slot = trainable_[g]->slots()[s];
      watch_gradient(slot.parameter, slot.name, [weak = weak_from_this(), g, s] {
        if (auto self = weak.lock()) self->on_gradient(g, s);
      });
    }
  }
  for (size_t i = 0; i < shards_.size(); ++i) {
    set_owner(shards_[i].tensor, [weak = weak_from_this(), i] {
      if (auto self = weak.lock()) self->on_updated(i);
    });
  }
  for (size_t u = 0; u < unit_modules_.size(); ++u) {
    hooks_.push_back(std::make_shared<Hooks>(weak_from_this(), u));
    unit_modules_[u]->set_hooks(hooks_.back());
  }
}

void ShardedEngine::on_updated(size_t shard) {
  if (!stale_) mark_stale();  // a second step without a backward between
  // One optimizer may hold a part of the shards; what the last one writes completes the update.
  updated_.insert(shard);
  if (updated_.size() == shards_.size()) refresh();
}

void ShardedEngine::on_gradient(size_t g, size_t s) {
  settle();
  FlatGroup& group = *trainable_[g];
  if (sync_ && !open_) open_round();
  act_at_backward_end();
  group.adopt(group.slots()[s], *pool_);
  if (sync_) {
    group.mark_ready(group.slots()[s]);
    if (options_.overlap) {
      size_t ready = next_;
      while (ready < trainable_.size() && trainable_[ready]->complete()) ++ready;
      launch_up_to(ready);
      for (size_t i = 0; i < next_ && trainable_[i]->reduction_done(); ++i) trainable_[i]->collect();
    }
  }
  if (unit_of_[g] >= 0) gathers_->gradient_landed(static_cast<size_t>(unit_of_[g]));
  comm_.progress();
}

void ShardedEngine::act_at_backward_end() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (std::exchange(anchored_task_, task) == task) return;
  std::shared_ptr<BackwardEnd> end = backward_end_.lock();
  if (!end) backward_end_ = end = std::make_shared<BackwardEnd>(weak_from_this());
  autograd::at_backward_end([end] {
    end->done = true;
    auto self = end->owner.lock();
    if (!self) return;
    self->anchored_task_ = -1;
    self->open_ ? self->finish() : self->gathers_->end_backward();
  });
}

std::vector<float> ShardedEngine::agree(bool failed_here) {
  size_t slots = 0;
  for (FlatGroup* group : trainable_) slots += group->slots().size();
  std::vector<float> flags;
  flags.reserve(slots + 1);
  for (FlatGroup* group : trainable_) {
    for (const FlatSlot& slot : group->slots()) flags.push_back(slot.used ? 1.0F : 0.0F);
  }
  flags.push_back(failed_here ? 1.0F : 0.0F);
  const at::Tensor all = at::from_blob(flags.data(), {static_cast<int64_t>(flags.size())}, at::kFloat);
  comm_.all_reduce(all, ReduceOp::max).released();
  return flags;
}

void ShardedEngine::fail_round(bool failed_here) {
  const std::vector<std::string> failed = comm_.all_gather_text(failed_here ? "failed" : "");
  drop_gradients();
  continue_accumulation();  // nothing is stepped on
  if (failed_here) return;
  std::vector<int> culprits;
  for (int rank = 0; rank < comm_.size(); ++rank) {
    if (!failed[static_cast<size_t>(rank)].empty()) culprits.push_back(comm_.world_rank(rank));
  }
  throw CommError({.rank = comm_.world_rank(comm_.rank()),
                   .group = comm_.name(),
                   .op = "backward",
                   .sequence = 0,
                   .peers = culprits,
                   .cause = "backward threw there, so the gradients of this step were dropped on every rank. A program that "
                            "catches it on all ranks may go on with the next step"});
}

double ShardedEngine::grad_norm(double norm_type) {
  if (!(norm_type > 0)) throw ConfigError("norm type is " + std::to_string(norm_type) + "; it must be above 0, or infinity");
  settle();
  finish();
  const at::NoGradGuard no_grad;
  const bool infinite = std::isinf(norm_type);
  double total = 0;
  bool nan = false;
  for (const NamedTensor& shard : shards_) {
    if (!shard.tensor.grad().defined() || shard.tensor.numel() == 0) continue;
    const double norm = at::linalg_vector_norm(shard.tensor.grad(), norm_type).item<double>();
    nan = nan || std::isnan(norm);
    total = infinite ? std::max(total, norm) : total + std::pow(norm, norm_type);
  }
  // A maximum does not carry NaN on every back end, and all ranks must return the same number.
  const at::Tensor sums = at::tensor({infinite ? 0.0 : total, nan ? 1.0 : 0.0}, at::kDouble);
  axes_.shard.all_reduce(sums, ReduceOp::sum).wait();
  if (infinite) {
    const at::Tensor largest = at::tensor({total}, at::kDouble);
    axes_.shard.all_reduce(largest, ReduceOp::max).wait();
    total = largest.item<double>();
  } else {
    total = std::pow(sums[0].item<double>(), 1.0 / norm_type);
  }
  if (sums[1].item<double>() > 0) total = std::nan("");
  check_replicas_agree(axes_, total);
  return total;
}

double ShardedEngine::clip_grad_norm(double max_norm, double norm_type) {
  const double norm = grad_norm(norm_type);
  const double factor = max_norm / (norm + kClipEpsilon);
  if (factor < 1.0) {
    const at::NoGradGuard no_grad;
    for (const NamedTensor& shard : shards_) {
      if (shard.tensor.grad().defined()) shard.tensor.mutable_grad().mul_(factor);
    }
  }
  return norm;
}

}  // namespace

std::shared_ptr<Engine> make_sharded_engine(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers,
                                            const std::vector<UnitSpec>& units, Comm comm, DataParallelOptions options) {
  return std::make_shared<ShardedEngine>(std::move(parameters), std::move(buffers), units, std::move(comm), std::move(options));
}

}  // namespace weft::parallel
