// A bucket: parameters whose gradients lie in one flat buffer and are reduced together.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "weft/comm/comm.h"
#include "weft/parallel/data_parallel.h"

namespace weft::parallel {

/// One parameter of a bucket.
struct Slot {
  std::string name;
  at::Tensor parameter;
  at::Tensor grad_view;   ///< the parameter's part of the flat gradient buffer, in the parameter's shape
  const void* storage;    ///< where the parameter's data lies; another address means that it was replaced
  bool ready = false;     ///< its gradient of this round has landed
  bool reduced = false;   ///< the buffer holds a sum over the ranks, not this rank's gradient
};

/// Flat gradient buffer [all slots | one used-flag per slot] and the reduction in flight on it.
class Bucket {
 public:
  /// Moves the parameters' storage into one flat buffer (their TensorImpl stays) and allocates the gradient buffer in
  /// memory that `comm` moves without staging. Collective. All parameters have one dtype and device.
  Bucket(const std::vector<NamedTensor>& parameters, at::ScalarType gradient_dtype, const Comm& comm);

  std::vector<Slot>& slots() { return slots_; }
  /// The parameters' flat buffer, padding included.
  const at::Tensor& flat_parameters() const { return flat_parameters_; }

  void open_round();
  bool complete() const { return missing_ == 0; }
  bool launched() const { return launched_; }
  /// Marks a slot's gradient as landed.
  void mark_ready(Slot& slot);

  /// Makes the parameter's grad() a view of the flat buffer, copying in what autograd put elsewhere.
  void adopt_gradient(Slot& slot);
  /// Starts the reduction; slots without gradient contribute zeros and a cleared used-flag.
  void launch(const Comm& comm, ReduceOp op);
  /// Waits until the reduced gradients are valid and may be written; presents them as grad(), or an undefined grad() for
  /// parameters that no rank used.
  void complete_round();

 private:
  at::Tensor flat_parameters_;  // [numel]
  at::Tensor flat_gradients_;   // [numel + slots]
  at::Tensor used_;             // [slots], the tail of flat_gradients_
  std::vector<Slot> slots_;
  Work work_;
  int64_t missing_ = 0;
  bool launched_ = false;
};

/// True if `grad` is the very view.
bool is_view_of(const at::Tensor& grad, const at::Tensor& view);

}  // namespace weft::parallel
