#include "weft/parallel/unit_gathers.h"

#include <ATen/ops/full.h>

#include <algorithm>

#include "weft/core/pattern.h"

namespace weft::parallel {

UnitGathers::Next UnitGathers::agree(Next mine) const {
  const at::Tensor most = at::full({1}, static_cast<int>(mine), at::kFloat);
  comm_.all_reduce(most, ReduceOp::max).wait();
  return static_cast<Next>(most.item<float>());
}

void UnitGathers::start(size_t k) {
  // What stays gathered by its own rule, or for a scope, is gathered on all ranks.
  if (units_[k].held > 0) return;
  if (!units_[k].reshard_after_forward && holds(k) && !in_backward_) return;
  // Forward gathers from everybody: only at the turn to backward have all ranks left the same copies.
  for (FlatGroup* group : units_[k].groups) in_backward_ ? group->start_gather_near() : group->start_gather();
}

void UnitGathers::wait(size_t k) {
  for (FlatGroup* group : units_[k].groups) group->finish_gather();
}

void UnitGathers::release(size_t k) {
  if (units_[k].held > 0) return;
  units_[k].active = false;
  for (FlatGroup* group : units_[k].groups) group->release();
}

/// In a forward pass, what does not run.
void UnitGathers::reshard_idle(size_t k) {
  if (units_[k].held > 0 || !holds(k) || units_[k].active || !units_[k].reshard_after_forward) return;
  for (FlatGroup* group : units_[k].groups) group->reshard();
}

void UnitGathers::begin_forward(size_t k) {
  if (units_[k].held > 0) return;
  if (in_backward_) return begin_backward(k);  // recomputation: it belongs to the backward that runs
  if (!holds(k)) {
    if (k < next_) complete_forward_pass();
    if (next_ == 0) agree(kPass);
    for (; next_ <= k; ++next_) start(next_);
  }
  for (size_t j = 0; j < k; ++j) reshard_idle(j);
  wait(k);
  units_[k].active = true;
  if (next_ == 0) return;
  for (; next_ < units_.size() && static_cast<int64_t>(next_) <= static_cast<int64_t>(k) + prefetch_; ++next_) start(next_);
}

void UnitGathers::end_forward(size_t k) {
  if (units_[k].held > 0 || in_backward_) return;
  units_[k].active = false;
  reshard_idle(k);
}

void UnitGathers::complete_forward_pass() {
  for (; next_ < units_.size(); ++next_) {
    start(next_);
    if (next_ > 0) reshard_idle(next_ - 1);  // one at a time: a rank that skips Units must not hold them all
  }
  for (size_t j = 0; j < units_.size(); ++j) reshard_idle(j);
  next_ = 0;
}

void UnitGathers::complete_forward() {
  if (next_ > 0) complete_forward_pass();
  while (agree(kNothing) == kPass) complete_forward_pass();
}

void UnitGathers::turn_to_backward() {
  complete_forward();
  in_backward_ = true;
  next_back_ = static_cast<int64_t>(units_.size()) - 1;
  back_.assign(units_.size(), false);
  for (size_t j = 0; j < units_.size(); ++j) back_[j] = units_[j].reshard_after_forward || !holds(j);
}

void UnitGathers::begin_backward_pass() {
  next_back_ = static_cast<int64_t>(units_.size()) - 1;
  back_.assign(units_.size(), true);
}

void UnitGathers::start_back_to(int64_t k) {
  for (; next_back_ >= k; --next_back_) {
    if (back_[static_cast<size_t>(next_back_)]) start(static_cast<size_t>(next_back_));
  }
}

void UnitGathers::complete_backward_pass() {
  while (next_back_ >= 0) {
    const auto k = static_cast<size_t>(next_back_);
    start_back_to(next_back_);
    if (back_[k] && !units_[k].active) release(k);
  }
}

void UnitGathers::begin_backward(size_t k) {
  if (units_[k].held > 0) return;
  if (!in_backward_) turn_to_backward();
  const auto at = static_cast<int64_t>(k);
  if (!holds(k)) {
    if (at > next_back_) {  // its turn has passed: another pass over all of them
      complete_backward_pass();
      agree(kPass);
      begin_backward_pass();
    }
    start_back_to(at);
  }
  for (size_t j = k + 1; j < units_.size(); ++j) {
    const ShardedUnit& unit = units_[j];
    const bool passed_over = !unit.active && back_[j];
    const bool done = unit.active && unit.frozen && unit.landed >= unit.trainable;
    if (holds(j) && (passed_over || done)) release(j);
  }
  activate(k);
  for (int64_t ahead = 0; ahead < prefetch_ && next_back_ >= 0; ++ahead) {
    while (next_back_ > 0 && !back_[static_cast<size_t>(next_back_)]) --next_back_;
    if (next_back_ < at - prefetch_) break;
    start_back_to(next_back_);
  }
}

void UnitGathers::use_in_backward(size_t k) {
  if (units_[k].held > 0) return;
  if (!in_backward_) turn_to_backward();
  if (!holds(k)) {
    if (static_cast<int64_t>(k) > next_back_) {
      complete_backward_pass();
      agree(kPass);
      begin_backward_pass();
    }
    start_back_to(0);
    for (size_t j = 0; j < units_.size(); ++j) {
      if (!units_[j].active && holds(j)) activate(j);
    }
  }
  activate(k);
}

void UnitGathers::activate(size_t k) {
  wait(k);
  if (!units_[k].active) units_[k].landed = 0;
  units_[k].active = true;
}

void UnitGathers::gradient_landed(size_t k) {
  if (units_[k].held > 0) return;
  ShardedUnit& unit = units_[k];
  if (++unit.landed >= unit.trainable && !unit.frozen) release(k);
}

bool UnitGathers::all_held() const {
  return std::all_of(units_.begin(), units_.end(), [](const ShardedUnit& unit) { return unit.held > 0; });
}

bool UnitGathers::end_backward(bool closes) {
  if (all_held()) return false;
  if (!in_backward_) turn_to_backward();
  complete_backward_pass();
  Next next = kNothing;
  while ((next = agree(closes ? kNothing : kMore)) == kPass) {
    begin_backward_pass();
    complete_backward_pass();
  }
  for (size_t j = 0; j < units_.size(); ++j) release(j);
  in_backward_ = false;
  next_ = 0;
  return next == kMore;
}

std::vector<size_t> UnitGathers::hold(const std::string& names) {
  complete_passes();
  std::vector<size_t> chosen;
  for (size_t j = 0; j < units_.size(); ++j) {
    const auto named = [&](const FlatSlot& slot) { return matches(names, slot.name); };
    const auto has_named = [&](const FlatGroup* group) { return std::any_of(group->slots().begin(), group->slots().end(), named); };
    if (std::any_of(units_[j].groups.begin(), units_[j].groups.end(), has_named)) chosen.push_back(j);
  }
  for (const size_t j : chosen) start(j);
  for (const size_t j : chosen) hold_one(j);
  return chosen;
}

/// Its gather has been started.
void UnitGathers::hold_one(size_t k) {
  wait(k);
  // Here, because let_go() runs in a destructor: nobody reads the shards any more.
  for (FlatGroup* group : units_[k].groups) group->settle();
  ++units_[k].held;
}

void UnitGathers::complete_passes() {
  if (in_backward_) end_backward(/*closes=*/false);
  if (!all_held()) complete_forward();
}

void UnitGathers::visit(const std::function<void(const FlatGroup&)>& see) {
  complete_passes();
  for (size_t k = 0; k < units_.size(); ++k) {
    start(k);
    hold_one(k);
    for (const FlatGroup* group : units_[k].groups) see(*group);
    let_go({k});
  }
}

std::string UnitGathers::held() const {
  for (const ShardedUnit& unit : units_) {
    if (unit.held > 0) return unit.name;
  }
  return {};
}

void UnitGathers::let_go(const std::vector<size_t>& units) {
  for (const size_t j : units) {
    if (--units_[j].held > 0) continue;
    for (FlatGroup* group : units_[j].groups) group->keep_written();
    release(j);
  }
}

}  // namespace weft::parallel
