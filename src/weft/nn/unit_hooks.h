// What happens around a Unit's forward; parallel/ implements it, nn/ calls it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "weft/autograd/recompute.h"

namespace weft::nn {

class UnitHooks {
 public:
  virtual ~UnitHooks() = default;
  /// The Unit's parameters are used from here on.
  virtual void before_forward() = 0;
  /// `outputs`: the tensors that the call returned.
  virtual void after_forward(const std::vector<at::Tensor>& outputs) = 0;
  /// The Unit's parameters are used inside a backward, by a second forward or a second derivative.
  virtual void needed_in_backward() = 0;
  /// Instead of after_forward() when the call throws. Must not throw, nor wait for other ranks.
  virtual void forward_threw() = 0;
};

/// One call of a Unit.
class UnitCall {
 public:
  explicit UnitCall(UnitHooks& hooks) : hooks_(hooks) { hooks_.before_forward(); }
  UnitCall(const UnitCall&) = delete;
  UnitCall& operator=(const UnitCall&) = delete;
  ~UnitCall() {
    if (!returned_) hooks_.forward_threw();
  }
  void returned(const std::vector<at::Tensor>& outputs) {
    returned_ = true;
    hooks_.after_forward(outputs);
  }

 private:
  UnitHooks& hooks_;
  bool returned_ = false;
};

/// The part of a Unit that does not depend on the user's module: who is told about its calls, and how it keeps activations.
class UnitBase {
 public:
  UnitBase() = default;
  /// A copy (clone()) is nobody's yet.
  UnitBase(const UnitBase& other) : activations_(other.activations_), dissolved_(other.dissolved_) {}
  UnitBase& operator=(const UnitBase& other) {
    activations_ = other.activations_;
    dissolved_ = other.dissolved_;
    return *this;
  }
  virtual ~UnitBase() = default;

  /// The engine that shards this Unit; null: calls go straight through. Held weakly: the engine may go first.
  void set_hooks(std::weak_ptr<UnitHooks> hooks) { hooks_ = std::move(hooks); }
  std::shared_ptr<UnitHooks> hooks() const { return hooks_.lock(); }

  /// Set by set_recompute() and offload_activations() (nn/activations.h).
  void set_activations(autograd::ActivationRule rule) { activations_ = std::move(rule); }
  const autograd::ActivationRule& activations() const { return activations_; }

  /// Not a unit of its own after all (a tied weight is used outside): its parameters belong to what is around it. Before the
  /// module is wrapped.
  void dissolve() { dissolved_ = true; }
  bool dissolved() const { return dissolved_; }

 private:
  std::weak_ptr<UnitHooks> hooks_;
  autograd::ActivationRule activations_;
  bool dissolved_ = false;
};

}  // namespace weft::nn
