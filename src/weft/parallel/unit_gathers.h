// When Units are gathered and released (ZeRO-3). The place to look for "where are the parameters gathered".
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "weft/comm/comm.h"
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
/// gathers before it that it has skipped; a pass is completed when the next begins. So a branch that some ranks do not take
/// costs its gather. A Unit that is used again after its release begins a new pass.
///
/// Which pass comes next is agreed in one number per pass (agree()): a rank that has nothing more to do stands in for what
/// others still begin. So ranks may use Units in different numbers of passes, and one whose forward or backward threw
/// stays in step.
class UnitGathers {
 public:
  /// prefetch: Units whose gather is started ahead of use. comm: the ranks that share the shards.
  UnitGathers(std::vector<ShardedUnit> units, int64_t prefetch, Comm comm)
      : units_(std::move(units)), prefetch_(prefetch), comm_(std::move(comm)) {}

  void begin_forward(size_t unit);
  void end_forward(size_t unit);
  /// A gradient has come to an output of the Unit.
  void begin_backward(size_t unit);
  /// Its parameters are needed in a backward, whether or not a gradient has come to an output. Nodes of a backward that
  /// differentiates another come in the order of the forward, against that of a backward pass: what is not there yet is gathered
  /// for all Units in one pass, and each stays until its gradients have landed.
  void use_in_backward(size_t unit);
  void gradient_landed(size_t unit);
  /// The end of a whole backward(): everything is released. Takes part in all that the other ranks gather, forward and backward,
  /// so that it stands for whole passes on a rank that used nothing. `closes`: this rank waits for the end of the round. True
  /// if another rank is going to run more forward and backward passes before.
  bool end_backward(bool closes);

  /// Gathers the Units with a parameter whose name matches and keeps them until let_go() of what it returns.
  std::vector<size_t> hold(const std::string& names);
  void let_go(const std::vector<size_t>& units);
  /// Gathers one Unit after the other and calls `see` for each of its groups meanwhile.
  void visit(const std::function<void(const FlatGroup&)>& see);
  /// Does its part of all passes that any rank has begun. Collective.
  void complete_passes();
  /// A Unit that a scope keeps gathered; empty if there is none.
  std::string held() const;

 private:
  enum Next { kNothing, kMore, kPass };  // the largest that a rank says holds for all

  bool holds(size_t k) const { return units_[k].groups.front()->holds_data(); }
  Next agree(Next mine) const;
  void start(size_t k);
  void wait(size_t k);
  void release(size_t k);
  void activate(size_t k);
  bool all_held() const;
  void reshard_idle(size_t k);
  void complete_forward_pass();
  void complete_forward();
  void turn_to_backward();
  void begin_backward_pass();
  void hold_one(size_t k);
  void start_back_to(int64_t k);
  void complete_backward_pass();

  std::vector<ShardedUnit> units_;
  int64_t prefetch_;
  Comm comm_;
  bool in_backward_ = false;
  size_t next_ = 0;         // forward: first Unit whose gather has not been started in this pass; 0: no pass has begun
  int64_t next_back_ = -1;  // backward: last Unit whose gather has not been started
  std::vector<bool> back_;  // Units that this backward pass gathers; equal on all ranks
};

}  // namespace weft::parallel
