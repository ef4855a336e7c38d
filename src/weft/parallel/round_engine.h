// What the replicated and the sharded engine share: when gradients are reduced, and what happens when a step fails.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "weft/parallel/agreement.h"
#include "weft/parallel/engine.h"
#include "weft/parallel/tensor_ranks.h"

namespace weft::parallel {

/// A round is one reduction of all gradients. It opens with the first gradient that lands while sync is on (or with
/// join_without_batch) and closes in finish(), which ends with the ranks' vote: if a rank's backward threw since the last
/// round, or its program broke a rule, the round counts on none, and the gradients since then are dropped on all.
///
/// How a backward that throws is seen: every backward leaves a callback at its end, and callbacks of a backward that throws
/// are dropped unrun. That opens a round, in which this rank is to vote against; peers are told at the next call that may
/// communicate, not in a destructor. They may be waiting: every member that communicates calls settle() first.
class RoundEngine : public Engine, public std::enable_shared_from_this<RoundEngine> {
 public:
  void sync(bool on) final { sync_ = on; }
  void finish() final;
  void settle() final;
  void join_without_batch() final;
  double grad_norm(double norm_type) final;
  double clip_grad_norm(double max_norm, double norm_type) final;
  void zero_grad() final;
  void visit_full(const std::function<void(const at::Tensor&)>& visit) override;
  void write_shards(const std::function<void()>& write) override;

  const std::vector<NamedTensor>& parameters() const final { return parameters_; }
  const Comm& comm() const final { return comm_; }
  const DataParallelOptions& options() const final { return options_; }

  /// Inside a backward, when something that this engine watches happens: its end closes the round, or the passes.
  void enter_backward() { enter_backward(nullptr); }

 protected:
  RoundEngine(Comm comm, DataParallelOptions options, std::vector<NamedTensor> buffers);

  /// Sorts the wrapped parameters, each listed once, into parameters_ and frozen_.
  void set_parameters(std::vector<NamedTensor> all);
  /// The hook of parameter `slot` in group `group`.
  void on_gradient(size_t group, size_t slot);
  /// For watch_gradient(): a backward begins whose loss was scaled for this engine.
  std::function<void()> begin_callback();
  bool synchronises() const { return sync_; }
  ReduceOp op() const { return options_.grad_scale == GradScale::sum ? ReduceOp::sum : ReduceOp::avg; }

  virtual const at::Tensor& parameter_at(size_t group, size_t slot) const = 0;
  /// A round has opened: nothing has landed, nothing is launched.
  virtual void begin_groups() = 0;
  /// A parameter's gradient is there: brings it into its flat buffer and, while sync is on, launches what is complete.
  virtual void land(size_t group, size_t slot) = 0;
  /// The first gradient of a round is about to land.
  virtual void check_can_add() {}
  /// Launches the reductions that were not; ConfigError when a gradient cannot be reduced.
  virtual void launch_rest() = 0;
  /// The same with zeros for a rank whose part does not count. Leaves the parameters' grad() as it is: it may hold gradients of
  /// the next backward already.
  virtual void launch_rest_failed() = 0;
  /// Waits for all reductions. False if any rank says `failed`. Collective.
  virtual bool close(bool failed) = 0;
  /// Presents what was reduced.
  virtual void present() = 0;
  /// A backward ended, or a rank stands in for one, and no round closes with it.
  virtual void complete_passes() {}
  virtual void drop_local() = 0;     ///< gradients of this rank that were not reduced
  virtual void drop_reduced() = 0;
  /// Brings gradients that the program itself has put in place into the flat buffers, but that of `landing`, which backward
  /// may have made. Returns the names.
  virtual std::vector<std::string> adopt_foreign(const at::Tensor* landing) = 0;
  /// A parameter whose storage is not the flat buffer any more, as a message; empty if there is none.
  virtual std::string find_moved() const = 0;
  /// Over which gradients of shards() are split.
  virtual Comm norm_comm() const = 0;
  /// Throws if other ranks have found another norm.
  virtual void check_norm(double) const {}

  Comm comm_;
  DataParallelOptions options_;
  std::vector<NamedTensor> parameters_;  // trainable
  std::vector<NamedTensor> frozen_, buffers_;

 private:
  struct BackwardEnd;

  void open_round();
  void backward_begins();
  void enter_backward(const at::Tensor* landing);
  void backward_ended();
  void backward_is_gone();
  void notice_backward_that_is_gone();
  StepFault take_fault();

  TensorRanks tensor_;        // of parameters_
  bool sync_ = true;
  bool open_ = false;
  bool failed_ = false;       // a backward threw: this rank votes against the round that is open
  bool told_foreign_ = false;
  std::string found_;         // what a hook of ours threw
  uint64_t round_ = 0;        // rounds opened so far
  int anchored_task_ = -1;    // backward whose end calls backward_ended()
  std::weak_ptr<BackwardEnd> backward_end_;
};

}  // namespace weft::parallel
