// When Units are gathered and released (ZeRO-3). The place to look for "where are the parameters gathered".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "weft/parallel/flat_group.h"

namespace weft::parallel {

struct ShardedUnit {
  std::string name;
  std::vector<FlatGroup*> groups;
  bool reshard_after_forward = true;
  int64_t trainable = 0;  ///< parameters whose gradients a backward may bring
  bool frozen = false;    ///< it has parameters without gradient, whose last use nobody sees

  // State of this pass.
  bool active = false;    ///< inside its forward, or its backward has begun
  int64_t landed = 0;     ///< gradients since its backward began
  int held = 0;           ///< scopes that keep it gathered; on all ranks the same
};

/// All ranks gather the same Units in the same order, whatever each of them uses: a forward pass goes through the Units in
/// registration order, a backward pass through those that are released in reverse. Whoever uses Unit k first takes part in the
/// gathers before it that it has skipped; a pass is completed when the next begins, or at the end of backward. A Unit that is
/// used again after its release begins a new pass. So a branch that some ranks do not take costs its gather and no agreement.
class UnitGathers {
 public:
  /// prefetch: Units whose gather is started ahead of use.
  UnitGathers(std::vector<ShardedUnit> units, int64_t prefetch) : units_(std::move(units)), prefetch_(prefetch) {}

  void begin_forward(size_t unit);
  void end_forward(size_t unit);
  /// A gradient has come to an output of the Unit.
  void begin_backward(size_t unit);
  void gradient_landed(size_t unit);
  /// The end of a whole backward(): everything is released. Takes part in what this pass has not gathered, forward and
  /// backward, so that it stands for a whole pass on a rank that used nothing.
  void end_backward();
  /// A pass in which this rank uses nothing begins; end_backward() completes it.
  void begin_without_use();

  /// Gathers the Units with a parameter whose name matches and keeps them until let_go() of what it returns.
  std::vector<size_t> hold(const std::string& names);
  void let_go(const std::vector<size_t>& units);

  bool in_backward() const { return in_backward_; }

 private:
  bool holds(size_t k) const { return units_[k].groups.front()->holds_data(); }
  void start(size_t k);
  void wait(size_t k);
  void release(size_t k);
  void reshard(size_t k);
  bool all_held() const;
  void finish_forward();
  void turn_to_backward();
  void start_back_to(int64_t k);

  std::vector<ShardedUnit> units_;
  int64_t prefetch_;
  bool in_backward_ = false;
  size_t next_ = 0;         // forward: first Unit whose gather has not been started in this pass
  int64_t next_back_ = -1;  // backward: last Unit whose gather has not been started
  std::vector<bool> back_;  // Units that this backward pass gathers
};

}  // namespace weft::parallel
