#include "weft/parallel/unit_gathers.h"

#include <algorithm>

#include "weft/core/pattern.h"

namespace weft::parallel {

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

/// After a forward.
void UnitGathers::reshard(size_t k) {
  if (units_[k].held > 0 || !units_[k].reshard_after_forward) return;
  units_[k].active = false;
  for (FlatGroup* group : units_[k].groups) group->reshard();
}

void UnitGathers::begin_forward(size_t k) {
  if (units_[k].held > 0) return;
  if (in_backward_) return begin_backward(k);  // recomputation: it belongs to the backward that runs
  if (!holds(k)) {
    if (k < next_) finish_forward();
    for (; next_ <= k; ++next_) start(next_);
  }
  for (size_t j = 0; j < k; ++j) {
    if (holds(j) && !units_[j].active) reshard(j);
  }
  wait(k);
  units_[k].active = true;
  for (; next_ < units_.size() && static_cast<int64_t>(next_) <= static_cast<int64_t>(k) + prefetch_; ++next_) start(next_);
}

void UnitGathers::end_forward(size_t k) {
  if (units_[k].held > 0 || in_backward_) return;
  units_[k].active = false;
  reshard(k);
}

void UnitGathers::finish_forward() {
  for (; next_ < units_.size(); ++next_) start(next_);
  for (size_t j = 0; j < units_.size(); ++j) {
    if (holds(j) && !units_[j].active) reshard(j);
  }
  next_ = 0;
}

void UnitGathers::turn_to_backward() {
  finish_forward();
  in_backward_ = true;
  next_back_ = static_cast<int64_t>(units_.size()) - 1;
  back_.assign(units_.size(), false);
  for (size_t j = 0; j < units_.size(); ++j) back_[j] = !holds(j);
}

void UnitGathers::start_back_to(int64_t k) {
  for (; next_back_ >= k; --next_back_) {
    if (back_[static_cast<size_t>(next_back_)]) start(static_cast<size_t>(next_back_));
  }
}

void UnitGathers::begin_backward(size_t k) {
  if (units_[k].held > 0) return;
  if (!in_backward_) turn_to_backward();
  const auto at = static_cast<int64_t>(k);
  if (!holds(k)) {
    if (at > next_back_) {  // its turn has passed: another pass over all of them
      start_back_to(0);
      next_back_ = static_cast<int64_t>(units_.size()) - 1;
      back_.assign(units_.size(), true);
    }
    start_back_to(at);
  }
  for (size_t j = k + 1; j < units_.size(); ++j) {
    const ShardedUnit& unit = units_[j];
    const bool passed_over = !unit.active && back_[j];
    const bool done = unit.active && unit.frozen && unit.landed >= unit.trainable;
    if (holds(j) && (passed_over || done)) release(j);
  }
  wait(k);
  if (!units_[k].active) units_[k].landed = 0;
  units_[k].active = true;
  for (int64_t ahead = 0; ahead < prefetch_ && next_back_ >= 0; ++ahead) {
    while (next_back_ > 0 && !back_[static_cast<size_t>(next_back_)]) --next_back_;
    if (next_back_ < at - prefetch_) break;
    start_back_to(next_back_);
  }
}

void UnitGathers::gradient_landed(size_t k) {
  if (units_[k].held > 0) return;
  ShardedUnit& unit = units_[k];
  if (++unit.landed >= unit.trainable && !unit.frozen) release(k);
}

bool UnitGathers::all_held() const {
  return std::all_of(units_.begin(), units_.end(), [](const ShardedUnit& unit) { return unit.held > 0; });
}

void UnitGathers::end_backward() {
  if (all_held()) return;
  if (!in_backward_) turn_to_backward();
  start_back_to(0);
  for (size_t j = 0; j < units_.size(); ++j) release(j);
  in_backward_ = false;
  next_ = 0;
}

void UnitGathers::begin_without_use() {
  if (next_ > 0) finish_forward();
}

std::vector<size_t> UnitGathers::hold(const std::string& names) {
  if (in_backward_) end_backward();
  if (next_ > 0) finish_forward();
  std::vector<size_t> chosen;
  for (size_t j = 0; j < units_.size(); ++j) {
    const auto named = [&](const FlatSlot& slot) { return matches(names, slot.name); };
    const auto has_named = [&](const FlatGroup* group) { return std::any_of(group->slots().begin(), group->slots().end(), named); };
    if (std::any_of(units_[j].groups.begin(), units_[j].groups.end(), has_named)) chosen.push_back(j);
  }
  for (const size_t j : chosen) start(j);
  for (const size_t j : chosen) {
    wait(j);
    // Here, because let_go() runs in a destructor: nobody reads the shards any more.
    for (FlatGroup* group : units_[j].groups) group->settle();
    ++units_[j].held;
  }
  return chosen;
}

void UnitGathers::let_go(const std::vector<size_t>& units) {
  for (const size_t j : units) {
    if (--units_[j].held > 0) continue;
    for (FlatGroup* group : units_[j].groups) group->keep_written();
    release(j);
  }
}

}  // namespace weft::parallel
