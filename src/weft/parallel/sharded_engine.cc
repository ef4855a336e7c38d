#include "weft/parallel/sharded_engine.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include "weft/autograd/saved_tensors.h"
#include "weft/core/error.h"
#include "weft/nn/placement.h"
#include "weft/nn/start_values.h"
#include "weft/parallel/buffers.h"
#include "weft/parallel/data_axes.h"
#include "weft/parallel/flat_view.h"
#include "weft/parallel/gradient_hook.h"
#include "weft/parallel/option_check.h"
#include "weft/parallel/round_engine.h"
#include "weft/parallel/shard_owner.h"
#include "weft/parallel/sharding_plan.h"
#include "weft/parallel/unit_calls.h"
#include "weft/parallel/unit_gathers.h"

namespace weft::parallel {
namespace {

/// Groups are reduce-scattered in their fixed order, each when it and all before it are complete. A round closes with one small
/// all_reduce: which parameters were used, and the ranks' vote. Where parameters are gathered: UnitGathers for Units,
/// refresh() for the rest. Gathers and reductions go through Comms of their own (DataAxes): the order within each is fixed, that
/// between them is not.
class ShardedEngine final : public RoundEngine {
 public:
  ShardedEngine(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers, const std::vector<UnitSpec>& units, Comm comm,
                DataParallelOptions options)
      : RoundEngine(std::move(comm), std::move(options), std::move(buffers)) {
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
    for (const auto& [group, unit] : released_) autograd::unwatch_memory(group->memory());
  }

  void watch() override;

  const std::vector<NamedTensor>& shards() const override { return shards_; }

  std::map<std::string, TrafficCount> traffic() const override { return traffic_of(axes_); }

  void sync_replicas(bool on) override;

  void refresh() override {
    check_reduced_across();
    bring_up_to_date();
  }

  void continue_accumulation() override {
    if (!std::exchange(stale_, false)) return;
    for (FlatGroup* group : whole_) group->set_current();
  }

  std::vector<size_t> hold_full(const std::string& names) override {
    settle();
    bring_up_to_date();
    return gathers_->hold(names);
  }
  void end_full(const std::vector<size_t>& units) override { gathers_->let_go(units); }
  void visit_full(const std::function<void(const at::Tensor&)>& visit) override;
  void write_shards(const std::function<void()>& write) override;

 private:
  void build(ShardingPlan& plan);
  void bring_up_to_date() {
    if (!std::exchange(stale_, false)) return;
    for (const auto& group : groups_) group->drop_near();
    for (FlatGroup* group : whole_) group->start_gather();
    for (FlatGroup* group : whole_) group->finish_gather();
  }
  void on_updated(size_t shard);

  void mark_stale() {
    for (const auto& group : groups_) group->set_stale();
    stale_ = true;
    updated_.clear();
  }

  const at::Tensor& parameter_at(size_t g, size_t s) const override { return trainable_[g]->slots()[s].parameter; }

  void begin_groups() override {
    next_ = taken_ = 0;
    for (FlatGroup* group : trainable_) group->open_round();
  }

  void land(size_t group, size_t slot) override;

  FlatGroup::Reduction how() const { return {.op = op(), .across = across_}; }
  void launch_up_to(size_t end) {
    for (; next_ < end; ++next_) {
      make_room_to_launch();
      trainable_[next_]->launch(*pool_, how());
    }
  }
  void launch_rest() override { launch_up_to(trainable_.size()); }
  void launch_rest_failed() override {
    for (; next_ < trainable_.size(); ++next_) {
      make_room_to_launch();
      trainable_[next_]->launch_failed(*pool_, how());
    }
  }

  /// False if none is in flight, or a peer needs this rank first.
  bool take_over_oldest() {
    if (taken_ == next_ || !trainable_[taken_]->take_over_unless_needed()) return false;
    ++taken_;
    return true;
  }
  /// What a rank holds must not depend on how far its peers are: what a reduction needs besides a buffer of the pool is there
  /// until the next one starts, neither longer nor shorter.
  void make_room_to_launch() {
    if (next_ == 0 || !trainable_[next_ - 1]->holds_memory()) return;
    while (take_over_oldest()) {
    }
  }

  bool close(bool failed) override {
    while (gathers_->end_backward(/*closes=*/true)) {
    }
    agree_on_use(failed);
    for (; taken_ < trainable_.size(); ++taken_) trainable_[taken_]->take_over();
    for (FlatGroup* group : trainable_) group->collect();
    for (const auto& group : groups_) group->settle();
    return used_.back() == 0.0F;
  }

  void present() override {
    mark_stale();
    size_t at = 0;
    for (FlatGroup* group : trainable_) {
      group->present(used_.data() + at);
      at += group->slots().size();
    }
  }

  void complete_passes() override { gathers_->end_backward(/*closes=*/false); }

  void drop_local() override {
    for (FlatGroup* group : trainable_) group->drop_local();
  }
  void drop_reduced() override {
    for (FlatGroup* group : trainable_) group->drop_reduced();
  }

  std::vector<std::string> adopt_foreign(const at::Tensor* landing) override;
  std::string find_moved() const override;
  void agree_on_use(bool failed);
  Comm norm_comm() const override { return axes_.shard; }
  void check_norm(double norm) const override {
    check_reduced_across();
    check_replicas_agree(axes_, norm);
  }
  void check_reduced_across() const;

  DataAxes axes_;
  std::vector<NamedTensor> shards_;
  std::vector<ShardInfo> infos_;          // of shards_
  std::vector<std::unique_ptr<FlatGroup>> groups_;
  std::vector<FlatGroup*> trainable_;     // in the order of their reductions
  std::vector<int64_t> unit_of_;          // of trainable_; -1 outside of Units
  std::vector<FlatGroup*> whole_;         // gathered by refresh()
  std::vector<std::pair<FlatGroup*, size_t>> released_;  // and the Unit that it belongs to
  std::unique_ptr<UnitGathers> gathers_;
  std::unique_ptr<GradientPool> pool_;
  std::vector<nn::UnitBase*> unit_modules_;
  std::vector<std::shared_ptr<nn::UnitHooks>> hooks_;
  std::vector<float> used_;               // of this round: per slot, above 0 where any rank had a gradient; last: a rank failed
  bool stale_ = false;                    // whole groups are out of date
  std::unordered_set<size_t> updated_;    // shards that Weft's optimizers have written since
  size_t next_ = 0;                       // first group not launched in this round
  size_t taken_ = 0;                      // first group whose reduction was not taken over
  bool across_ = true;                    // rounds reduce over the replicas, too
};

void ShardedEngine::build(ShardingPlan& plan) {
  std::vector<ShardedUnit> units(plan.units.size());
  for (size_t u = 0; u < units.size(); ++u) {
    units[u].name = plan.units[u];
    units[u].reshard_after_forward = settings_of(plan.units[u], options_).reshard.after_forward();
  }
  struct Part {
    at::Tensor shard;
    ShardInfo info;
  };
  std::unordered_map<const void*, Part> part_of;
  std::vector<int64_t> unit_gradients, other_gradients;
  for (PlannedGroup& planned : plan.groups) {
    groups_.push_back(std::make_unique<FlatGroup>(planned.plan, planned.parameters, axes_));
    FlatGroup* group = groups_.back().get();
    group->release();  // before the next is made: together they would be the whole model
    (planned.unit >= 0 ? unit_gradients : other_gradients).push_back(group->gradient_bytes());
    if (planned.plan.residence == Residence::whole) whole_.push_back(group);
    if (planned.unit >= 0) {
      ShardedUnit& unit = units[static_cast<size_t>(planned.unit)];
      unit.groups.push_back(group);
      released_.emplace_back(group, static_cast<size_t>(planned.unit));
      unit.trainable += planned.plan.trainable ? static_cast<int64_t>(group->slots().size()) : 0;
      unit.frozen = unit.frozen || !planned.plan.trainable;
    }
    if (!planned.plan.trainable) continue;
    trainable_.push_back(group);
    unit_of_.push_back(planned.unit);
    for (const FlatSlot& slot : group->slots()) {
      ShardInfo info{.name = slot.name, .shape = slot.parameter.sizes().vec(), .cuts = group->cuts(slot), .ranks = axes_.shard};
      part_of.emplace(slot.parameter.unsafeGetTensorImpl(), Part{slot.shard, std::move(info)});
    }
  }
  if (!trainable_.empty()) {
    pool_ = std::make_unique<GradientPool>(layout::gradient_buffers(unit_gradients, other_gradients), trainable_.front()->device(), axes_.shard,
                                           [this] { return take_over_oldest(); });
  }
  for (const NamedTensor& p : plan.all) {
    if (!p.tensor.requires_grad()) continue;
    const Part& part = part_of.at(p.tensor.unsafeGetTensorImpl());
    shards_.push_back({p.name, part.shard});
    if (const auto placement = nn::placement_of(p.tensor)) nn::set_placement(part.shard, *placement);
    infos_.push_back(part.info);
  }
  set_parameters(std::move(plan.all));
  gathers_ = std::make_unique<UnitGathers>(std::move(units), options_.prefetch, axes_.gathers);
  unit_modules_ = plan.unit_modules;
}

void ShardedEngine::watch() {
  for (size_t g = 0; g < trainable_.size(); ++g) {
    for (size_t s = 0; s < trainable_[g]->slots().size(); ++s) {
      const FlatSlot& slot = trainable_[g]->slots()[s];
      watch_gradient(slot.parameter, slot.name, [weak = weak_from_this(), g, s] {
        if (auto self = std::static_pointer_cast<ShardedEngine>(weak.lock())) self->on_gradient(g, s);
      }, begin_callback());
    }
  }
  for (size_t i = 0; i < shards_.size(); ++i) {
    set_owner(shards_[i].tensor, infos_[i], [weak = weak_from_this(), i] {
      if (auto self = std::static_pointer_cast<ShardedEngine>(weak.lock())) self->on_updated(i);
    });
  }
  for (size_t u = 0; u < unit_modules_.size(); ++u) {
    hooks_.push_back(watch_unit(weak_from_this(), *gathers_, u));
    unit_modules_[u]->set_hooks(hooks_.back());
  }
  for (const auto& [group, unit] : released_) {
    autograd::watch_memory(group->memory(), [weak = std::weak_ptr(hooks_[unit])] {
      if (const auto hooks = weak.lock()) hooks->needed_in_backward();
    });
  }
}

void ShardedEngine::visit_full(const std::function<void(const at::Tensor&)>& visit) {
  settle();
  refresh();
  std::unordered_set<const void*> seen;
  gathers_->visit([&](const FlatGroup& group) {
    for (const FlatSlot& slot : group.slots()) {
      visit(slot.parameter);
      seen.insert(slot.parameter.unsafeGetTensorImpl());
    }
  });
  for (const auto* list : {&parameters_, &frozen_}) {
    for (const NamedTensor& p : *list) {
      if (!seen.contains(p.tensor.unsafeGetTensorImpl())) visit(p.tensor);
    }
  }
}

void ShardedEngine::write_shards(const std::function<void()>& write) {
  settle();
  if (const std::string held = gathers_->held(); !held.empty()) {
    throw ConfigError("shards are written while unit '" + held + "' is kept gathered, which would bring its old values back. End the "
                      "scope of gather_full() or unsharded() first");
  }
  gathers_->complete_passes();
  for (const auto& group : groups_) group->settle();  // peers may still read what they gathered last
  std::exception_ptr thrown;
  try {
    write();
  } catch (...) {
    thrown = std::current_exception();
  }
  mark_stale();
  refresh();
  if (thrown) std::rethrow_exception(thrown);
}

void ShardedEngine::on_updated(size_t shard) {
  if (!stale_) mark_stale();  // a second step without a backward between
  // One optimizer may hold a part of the shards; what the last one writes completes the update.
  updated_.insert(shard);
  if (updated_.size() == shards_.size()) refresh();
}

void ShardedEngine::land(size_t g, size_t s) {
  FlatGroup& group = *trainable_[g];
  FlatSlot& slot = group.slots()[s];
  if (synchronises()) group.mark_ready(slot);
  group.adopt(slot, *pool_);
  if (synchronises() && options_.overlap) {
    size_t ready = next_;
    while (ready < trainable_.size() && trainable_[ready]->complete()) ++ready;
    launch_up_to(ready);
    while (taken_ < next_ && !trainable_[taken_]->holds_memory() && trainable_[taken_]->reduction_done()) trainable_[taken_++]->take_over();
  }
  if (unit_of_[g] >= 0) gathers_->gradient_landed(static_cast<size_t>(unit_of_[g]));
}

void ShardedEngine::sync_replicas(bool on) {
  settle();
  if (axes_.replicas.size() == 1 || on == across_) return;
  finish();
  const at::Tensor said = at::zeros({2}, at::kFloat);
  said[on ? 1 : 0] = 1;
  comm_.all_reduce(said, ReduceOp::max).wait();
  if (number_of(said.sum()) > 1) {
    throw ConfigError("sync_replicas(true) on some ranks and sync_replicas(false) on others: replicas that reduce in different rounds would "
                      "drift apart. Every rank makes the same calls");
  }
  across_ = on;
}

void ShardedEngine::check_reduced_across() const {
  if (std::none_of(trainable_.begin(), trainable_.end(), [](const FlatGroup* group) { return group->holds_partial_sums(); })) return;
  throw ConfigError("gradients were reduced within replicas only, and are not there yet. Call sync_replicas(true) before the last "
                    "micro-step of an accumulation, or zero_grad() to drop them");
}

std::vector<std::string> ShardedEngine::adopt_foreign(const at::Tensor* landing) {
  std::vector<std::string> names;
  for (FlatGroup* group : trainable_) {
    for (FlatSlot& slot : group->slots()) {
      if (!slot.parameter.grad().defined() || (landing != nullptr && slot.parameter.is_same(*landing))) continue;
      if (group->adopt(slot, *pool_)) names.push_back(slot.name);
    }
  }
  return names;
}

std::string ShardedEngine::find_moved() const {
  for (const auto& group : groups_) {
    for (const FlatSlot& slot : group->slots()) {
      if (!group->at_home(slot)) return moved_text(slot.name);
    }
  }
  return {};
}

void ShardedEngine::agree_on_use(bool failed) {
  used_.clear();
  for (FlatGroup* group : trainable_) {
    for (const FlatSlot& slot : group->slots()) used_.push_back(slot.used ? 1.0F : 0.0F);
  }
  used_.push_back(failed ? 1.0F : 0.0F);
  const at::Tensor all = at::from_blob(used_.data(), {static_cast<int64_t>(used_.size())}, at::kFloat);
  comm_.all_reduce(all, ReduceOp::max).released();
}

}  // namespace

std::shared_ptr<Engine> make_sharded_engine(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers,
                                            const std::vector<UnitSpec>& units, Comm comm, DataParallelOptions options) {
  return std::make_shared<ShardedEngine>(std::move(parameters), std::move(buffers), units, std::move(comm), std::move(options));
}

}  // namespace weft::parallel
