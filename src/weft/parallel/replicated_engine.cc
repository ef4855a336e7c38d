#include "weft/parallel/replicated_engine.h"

#include <torch/csrc/autograd/graph_task.h>

#include <cmath>
#include <limits>
#include <unordered_set>

#include "weft/autograd/backward_end.h"
#include "weft/core/error.h"
#include "weft/parallel/agreement.h"
#include "weft/parallel/bucket.h"
#include "weft/parallel/buffers.h"
#include "weft/parallel/gradient_hook.h"

namespace weft::parallel {
namespace {

/// A round is one reduction of all gradients. It opens with the first gradient that lands while sync is on (or with
/// join_without_batch) and closes in finish(). Buckets are launched in their fixed order, each when it and all before it
/// are complete; what is missing at the end of backward contributes zeros. The last bucket always waits for that end, and
/// its failed-flag is the ranks' vote: if a rank's backward threw, the round counts on none.
class ReplicatedEngine final : public Engine, public std::enable_shared_from_this<ReplicatedEngine> {
 public:
  ReplicatedEngine(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers, Comm comm, DataParallelOptions options)
      : comm_(std::move(comm)), options_(std::move(options)), buffers_(std::move(buffers)) {
    std::unordered_set<const void*> seen;  // a tied parameter is listed once per place; it is one parameter
    std::vector<NamedTensor> all;
    for (NamedTensor& p : parameters) {
      if (seen.insert(p.tensor.unsafeGetTensorImpl()).second) all.push_back(std::move(p));
    }
    reduction_ = {.comm = comm_,
                  .op = options_.grad_scale == GradScale::sum ? ReduceOp::sum : ReduceOp::avg,
                  .hook = make_hook()};
    check_same_model(all, buffers_, options_, comm_);
    for (NamedTensor& p : all) (p.tensor.requires_grad() ? parameters_ : frozen_).push_back(std::move(p));
    // At size 1 there is nothing to reduce, and the module is left as it is unless its gradients are kept in another dtype.
    if (comm_.size() == 1 && !options_.gradient_dtype) return;
    make_buckets();
    broadcast_from_first();
  }

  ~ReplicatedEngine() override {
    for (const NamedTensor& p : parameters_) unwatch_gradient(p.tensor);
  }

  /// Separate from construction: hooks hold a weak reference to this.
  void watch() override {
    for (size_t b = 0; b < buckets_.size(); ++b) {
      for (size_t s = 0; s < buckets_[b].slots().size(); ++s) {
        const Slot& slot = buckets_[b].slots()[s];
        watch_gradient(slot.parameter, slot.name, [weak = weak_from_this(), b, s] {
          if (auto self = weak.lock()) self->on_gradient(b, s);
        });
      }
    }
  }

  void sync(bool on) override { sync_ = on; }

  void finish() override {
    if (!open_) return;
    open_ = false;  // first: after a failure the round is over, whoever retries gets the group's error
    const bool failed_here = std::exchange(failed_, false);
    failed_here ? launch_failed() : launch_up_to(buckets_.size());
    bool good = true;
    for (Bucket& bucket : buckets_) good = bucket.wait();  // the last one's vote
    if (!good) return drop_round(failed_here);
    for (Bucket& bucket : buckets_) bucket.present();
    synchronise_buffers(buffers_, options_.buffers, comm_);
    check_still_frozen();  // last: it may throw on this rank alone
  }

  /// Closes a round that this rank's backward left with an exception, so that its peers are told. They may be waiting: every
  /// member that communicates calls it first.
  void settle() override {
    if (failed_) finish();
  }

  void join_without_batch() override {
    if (buckets_.empty()) return;
    if (!open_) open_round();
    finish();
  }

  double grad_norm(double norm_type) override {
    if (!(norm_type > 0)) throw ConfigError("norm type is " + std::to_string(norm_type) + "; it must be above 0, or infinity");
    finish();
    const at::NoGradGuard no_grad;
    const bool infinite = std::isinf(norm_type);
    double total = 0;
    for (const NamedTensor& p : parameters_) {
      if (!p.tensor.grad().defined() || p.tensor.numel() == 0) continue;
      const double norm = at::linalg_vector_norm(p.tensor.grad(), norm_type).item<double>();
      if (std::isnan(norm)) return norm;
      total = infinite ? std::max(total, norm) : total + std::pow(norm, norm_type);
    }
    return infinite ? total : std::pow(total, 1.0 / norm_type);
  }

  double clip_grad_norm(double max_norm, double norm_type) override {
    const double norm = grad_norm(norm_type);
    const double factor = max_norm / (norm + kClipEpsilon);
    if (factor < 1.0) {
      const at::NoGradGuard no_grad;
      for (const NamedTensor& p : parameters_) {
        if (p.tensor.grad().defined()) p.tensor.mutable_grad().mul_(factor);
      }
    }
    return norm;
  }

  void zero_grad() override {
    for (NamedTensor& p : parameters_) p.tensor.mutable_grad().reset();
  }

  const std::vector<NamedTensor>& parameters() const override { return parameters_; }
  /// Every rank updates everything.
  const std::vector<NamedTensor>& shards() const override { return parameters_; }
  const Comm& comm() const override { return comm_; }
  const DataParallelOptions& options() const override { return options_; }

 private:
  at::ScalarType gradient_dtype(const at::Tensor& parameter) const {
    return options_.gradient_dtype.value_or(c10::toRealValueType(parameter.scalar_type()));
  }

  void make_buckets() {
    std::vector<layout::BucketItem> items;
    for (const NamedTensor& p : parameters_) {
      const auto dtype = gradient_dtype(p.tensor);
      const int64_t numel = p.tensor.is_complex() ? 2 * p.tensor.numel() : p.tensor.numel();
      items.push_back({.bytes = numel * static_cast<int64_t>(c10::elementSize(dtype)),
                       .key = p.tensor.toString() + c10::toString(dtype)});
    }
    for (const auto& members : layout::make_buckets(items, options_.bucket)) {
      // Within a bucket the table's order, so that neighbours in the model are neighbours in memory.
      std::vector<NamedTensor> tensors;
      for (auto it = members.rbegin(); it != members.rend(); ++it) tensors.push_back(parameters_[*it]);
      buckets_.emplace_back(tensors, gradient_dtype(tensors.front().tensor), comm_);
    }
  }

  void broadcast_from_first() {
    const at::NoGradGuard no_grad;
    for (Bucket& bucket : buckets_) comm_.broadcast(bucket.flat_parameters(), 0).released();
    for (const std::vector<NamedTensor>* list : {&frozen_, &buffers_}) {
      for (const NamedTensor& t : *list) broadcast_tensor(t.tensor, comm_);
    }
  }

  void on_gradient(size_t b, size_t s) {
    settle();
    Slot& slot = buckets_[b].slots()[s];
    if (!sync_) {
      buckets_[b].adopt_gradient(slot);
      return;
    }
    const bool first = !open_;
    if (first) open_round();
    finish_at_backward_end();
    if (first && options_.grad_scale == GradScale::sum) check_nothing_reduced_yet();
    buckets_[b].adopt_gradient(slot);
    buckets_[b].mark_ready(slot);
    if (!options_.overlap) return;
    size_t ready = next_;
    while (ready + 1 < buckets_.size() && buckets_[ready].complete()) ++ready;
    launch_up_to(ready);
    comm_.progress();
  }

  /// Shared by the callbacks that wait for the end of one round's backward. If backward throws, they are dropped unrun.
  struct BackwardEnd {
    BackwardEnd(std::weak_ptr<ReplicatedEngine> owner, uint64_t round) : owner(std::move(owner)), round(round) {}
    std::weak_ptr<ReplicatedEngine> owner;
    uint64_t round;
    ~BackwardEnd() {
      if (auto self = owner.lock()) self->backward_is_gone(round);
    }
  };

  /// Nothing happens here if the round is over. Else backward threw: its gradients are dropped, so that the next backward's
  /// land beside the flat buffers, which may be in flight. Peers are told at the next call, not in a destructor.
  void backward_is_gone(uint64_t round) {
    if (!open_ || round != round_) return;
    failed_ = true;
    zero_grad();
  }

  void finish_at_backward_end() {
    const int task = torch::autograd::get_current_graph_task_id();
    if (std::exchange(anchored_task_, task) == task) return;
    std::shared_ptr<BackwardEnd> end = backward_end_.lock();
    if (!end) backward_end_ = end = std::make_shared<BackwardEnd>(weak_from_this(), round_);
    autograd::at_backward_end([end] {
      if (auto self = end->owner.lock()) self->finish();
    });
  }

  void open_round() {
    open_ = true;
    ++round_;
    next_ = 0;
    anchored_task_ = -1;
    backward_end_.reset();
    for (Bucket& bucket : buckets_) bucket.open_round();
  }

  /// Reducing a sum again would multiply it by the number of ranks; a mean of equal values stays what it is.
  void check_nothing_reduced_yet() {
    for (Bucket& bucket : buckets_) {
      for (Slot& slot : bucket.slots()) {
        const at::Tensor& grad = slot.parameter.grad();
        if (!slot.reduced || !grad.defined() || !is_view_of(grad, slot.grad_view)) continue;
        throw ConfigError("parameter '" + slot.name + "' already holds a reduced gradient, and GradScale::sum cannot add to "
                          "it. Call zero_grad() before this backward, or sync(false) for all backward calls but the last");
      }
    }
  }

  /// A parameter that was unfrozen after wrapping has no bucket: the ranks would drift apart without a word.
  void check_still_frozen() const {
    for (const NamedTensor& p : frozen_) {
      if (!p.tensor.requires_grad()) continue;
      throw ConfigError("parameter '" + p.name + "' was frozen when it was wrapped and requires a gradient now, which is not "
                        "reduced. Unfreeze before wrapping, or wrap again");
    }
  }

  ReduceHook make_hook() const {
    if (options_.reduce_dtype && options_.reduce_hook) {
      throw ConfigError("both reduce_dtype and reduce_hook are given, and each says how gradients travel; leave one out");
    }
    const ReduceHook hook = options_.reduce_dtype ? reduce_as(*options_.reduce_dtype) : options_.reduce_hook;
    return comm_.size() > 1 ? hook : ReduceHook();
  }

  void launch_up_to(size_t end) {
    for (; next_ < end; ++next_) buckets_[next_].launch(reduction_, static_cast<int64_t>(next_));
  }

  void launch_failed() {
    for (; next_ < buckets_.size(); ++next_) buckets_[next_].launch_failed(reduction_, static_cast<int64_t>(next_));
  }

  /// All ranks are here. Those whose backward threw know; the others have to.
  void drop_round(bool failed_here) {
    const std::vector<std::string> failed = comm_.all_gather_text(failed_here ? "failed" : "");
    if (failed_here) return;  // grad() may hold the next backward's gradients already
    zero_grad();
    std::vector<int> culprits;
    for (int rank = 0; rank < comm_.size(); ++rank) {
      if (!failed[static_cast<size_t>(rank)].empty()) culprits.push_back(comm_.world_rank(rank));
    }
    throw CommError({.rank = comm_.world_rank(comm_.rank()),
                     .group = comm_.name(),
                     .op = "backward",
                     .sequence = round_ - 1,
                     .peers = culprits,
                     .cause = "backward threw there, so the gradients of this step were dropped on every rank. A program that "
                              "catches it on all ranks may go on with the next step"});
  }

  Comm comm_;
  DataParallelOptions options_;
  std::vector<NamedTensor> parameters_, frozen_, buffers_;
  std::vector<Bucket> buckets_;
  Reduction reduction_;
  bool sync_ = true;
  bool open_ = false;
  bool failed_ = false;       // backward threw while the round was open
  uint64_t round_ = 0;        // rounds opened so far
  size_t next_ = 0;           // first bucket not launched in this round
  int anchored_task_ = -1;    // backward whose end calls finish()
  std::weak_ptr<BackwardEnd> backward_end_;  // of this round
};

}  // namespace

std::shared_ptr<Engine> make_replicated_engine(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers, Comm comm,
                                               DataParallelOptions options) {
  return std::make_shared<ReplicatedEngine>(std::move(parameters), std::move(buffers), std::move(comm), std::move(options));
}

}  // namespace weft::parallel
