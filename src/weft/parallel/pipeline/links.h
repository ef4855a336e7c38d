// Activations and their gradients between the ranks of a pipeline: shapes, and messages in flight.
#pragma once

#include <deque>
#include <map>
#include <vector>

#include "weft/comm/comm.h"

namespace weft::parallel {

/// What one stage hands to the next in one micro-batch, without values.
struct TensorShape {
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  bool requires_grad = false;
  bool operator==(const TensorShape&) const = default;
};
using Shapes = std::vector<TensorShape>;
Shapes shapes_of(const std::vector<at::Tensor>& tensors);
std::string to_text(const Shapes& shapes);

/// A receipt that was started.
struct Incoming {
  std::vector<at::Tensor> tensors;
  std::vector<Work> work;
  /// The tensors, once they are there.
  std::vector<at::Tensor> wait();
};

/// Messages between neighbours. Shapes travel ahead of values in the first step only, and are remembered by stage and micro-batch.
class Links {
 public:
  Links(Comm comm, at::Device device) : comm_(std::move(comm)), device_(device) {}

  /// Of one kind of step (training, or forward only), from now on. learn: shapes travel, and replace what was known.
  void begin(bool forward_only, bool learn);

  void send_activation(int stage, int micro_batch, const std::vector<at::Tensor>& outputs, int to);
  /// Input of `stage`; with shapes that are not known yet it waits for these.
  Incoming recv_activation(int stage, int micro_batch, int from);
  /// Of the inputs of `stage` that require a gradient.
  void send_grad(const std::vector<at::Tensor>& gradients, int to);
  /// Of the outputs of `stage` that require one; `shapes`: of these outputs.
  Incoming recv_grad(const Shapes& shapes, int from);

  /// Lets go of what has arrived.
  void progress();
  /// Returns when nothing that was sent is needed any more.
  void finish();

 private:
  Shapes& known(int stage, int micro_batch) { return shapes_[forward_only_][{stage, micro_batch}]; }
  void start(const at::Tensor& tensor, int to);

  Comm comm_;
  at::Device device_;
  bool forward_only_ = false, learn_ = true;
  std::map<std::pair<int, int>, Shapes> shapes_[2];  // of the tensors between stage - 1 and stage
  std::deque<Work> sent_;
};

}  // namespace weft::parallel
