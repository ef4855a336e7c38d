// A bucket: parameters whose gradients lie in one flat buffer and are reduced together.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
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
  uint32_t version = 0;   ///< of grad_view when its bucket was launched: another one means that backward added to it since

  bool at_home() const { return parameter.const_data_ptr() == storage; }
};

/// How buckets are reduced: all the same way.
struct Reduction {
  Comm comm;
  ReduceOp op;
  ReduceHook hook;  ///< empty: one all_reduce
};

/// Flat gradient buffer [all slots | one used-flag per slot | failed-flag] and the reduction in flight on it.
class Bucket {
 public:
  /// Moves the parameters' storage into one flat buffer (their TensorImpl stays) and allocates the gradient buffer in
  /// memory that `comm` moves without staging. Collective. All parameters have one dtype and device.
  Bucket(const std::vector<NamedTensor>& parameters, at::ScalarType gradient_dtype, const Comm& comm);

  std::vector<Slot>& slots() { return slots_; }
  const std::vector<Slot>& slots() const { return slots_; }
  /// The parameters' flat buffer, padding included.
  const at::Tensor& flat_parameters() const { return flat_parameters_; }

  void open_round();
  bool complete() const { return missing_ == 0; }
  bool launched() const { return launched_; }
  /// Marks a slot's gradient as landed. Backward also says so when a function gave the parameter none.
  void mark_ready(Slot& slot);

  /// Makes the parameter's grad() a view of the flat buffer, copying in what autograd put elsewhere. True if it copied.
  bool adopt_gradient(Slot& slot);
  /// Starts the reduction; slots without gradient contribute zeros and a cleared used-flag.
  void launch(const Reduction& how, int64_t index);
  /// Takes part with zeros and a set failed-flag: this rank's backward ended with an exception. The parameters' grad()
  /// stays as it is.
  void launch_failed(const Reduction& how, int64_t index);
  /// Waits until the reduced gradients are valid and may be written. False if a rank launched with its failed-flag set.
  bool wait();
  /// Presents the reduced gradients as grad(), or an undefined grad() for parameters that no rank used.
  void present();

 private:
  void start(const Reduction& how, int64_t index, const std::vector<float>& flags);

  at::Tensor flat_parameters_;  // [numel]
  at::Tensor flat_gradients_;   // [numel + slots + 1]
  at::Tensor gradients_;        // [numel], its beginning
  at::Tensor flags_;            // [slots + 1], its end
  std::vector<Slot> slots_;
  Work work_;
  std::function<void()> finish_hook_;  // what completes the hook's reduction
  int64_t missing_ = 0;
  bool launched_ = false;
};

/// True if `grad` is the very view.
bool is_view_of(const at::Tensor& grad, const at::Tensor& view);

}  // namespace weft::parallel
