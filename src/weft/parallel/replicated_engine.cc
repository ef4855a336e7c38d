#include "weft/parallel/replicated_engine.h"

#include <unordered_set>

#include "weft/core/error.h"
#include "weft/parallel/bucket.h"
#include "weft/parallel/buffers.h"
#include "weft/parallel/gradient_hook.h"
#include "weft/parallel/round_engine.h"

namespace weft::parallel {
namespace {

/// Buckets are launched in their fixed order, each when it and all before it are complete; what is missing at the end of
/// backward contributes zeros. The last bucket always waits for that end, and its failed-flag is the ranks' vote.
class ReplicatedEngine final : public RoundEngine {
 public:
  ReplicatedEngine(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers, Comm comm, DataParallelOptions options)
      : RoundEngine(std::move(comm), std::move(options), std::move(buffers)) {
    std::unordered_set<const void*> seen;  // a tied parameter is listed once per place; it is one parameter
    std::vector<NamedTensor> all;
    for (NamedTensor& p : parameters) {
      if (seen.insert(p.tensor.unsafeGetTensorImpl()).second) all.push_back(std::move(p));
    }
    reduction_ = {.comm = comm_, .op = op(), .hook = make_hook()};
    check_same_model(all, buffers_, options_, comm_);
    set_parameters(std::move(all));
    // At size 1 there is nothing to reduce, and the module is left as it is unless its gradients are kept in another dtype.
    if (comm_.size() == 1 && !options_.gradient_dtype) return;
    make_buckets();
    broadcast_from_first();
  }

  ~ReplicatedEngine() override {
    for (const NamedTensor& p : parameters_) unwatch_gradient(p.tensor);
  }

  void watch() override {
    for (size_t b = 0; b < buckets_.size(); ++b) {
      for (size_t s = 0; s < buckets_[b].slots().size(); ++s) {
        const Slot& slot = buckets_[b].slots()[s];
        watch_gradient(slot.parameter, slot.name, [weak = weak_from_this(), b, s] {
          if (auto self = std::static_pointer_cast<ReplicatedEngine>(weak.lock())) self->on_gradient(b, s);
        }, begin_callback());
      }
    }
  }

  /// Every rank updates everything.
  const std::vector<NamedTensor>& shards() const override { return parameters_; }

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

  ReduceHook make_hook() const {
    if (options_.reduce_dtype && options_.reduce_hook) {
      throw ConfigError("both reduce_dtype and reduce_hook are given, and each says how gradients travel; leave one out");
    }
    const ReduceHook hook = options_.reduce_dtype ? reduce_as(*options_.reduce_dtype) : options_.reduce_hook;
    return comm_.size() > 1 ? hook : ReduceHook();
  }

  const at::Tensor& parameter_at(size_t b, size_t s) const override { return buckets_[b].slots()[s].parameter; }

  void begin_groups() override {
    next_ = 0;
    for (Bucket& bucket : buckets_) bucket.open_round();
  }

  void land(size_t b, size_t s) override {
    Slot& slot = buckets_[b].slots()[s];
    buckets_[b].adopt_gradient(slot);
    if (!synchronises()) return;
    buckets_[b].mark_ready(slot);
    if (!options_.overlap) return;
    size_t ready = next_;
    while (ready + 1 < buckets_.size() && buckets_[ready].complete()) ++ready;
    launch_up_to(ready);
  }

  /// Reducing a sum again would multiply it by the number of ranks; a mean of equal values stays what it is.
  void check_can_add() override {
    if (options_.grad_scale != GradScale::sum) return;
    for (Bucket& bucket : buckets_) {
      for (Slot& slot : bucket.slots()) {
        const at::Tensor& grad = slot.parameter.grad();
        if (!slot.reduced || !grad.defined() || !is_view_of(grad, slot.grad_view)) continue;
        throw ConfigError("parameter '" + slot.name + "' already holds a reduced gradient, and GradScale::sum cannot add to "
                          "it. Call zero_grad() before this backward, or sync(false) for all backward calls but the last");
      }
    }
  }

  void launch_up_to(size_t end) {
    for (; next_ < end; ++next_) buckets_[next_].launch(reduction_, static_cast<int64_t>(next_));
  }

  void launch_rest() override { launch_up_to(buckets_.size()); }

  void launch_rest_failed() override {
    for (; next_ < buckets_.size(); ++next_) buckets_[next_].launch_failed(reduction_, static_cast<int64_t>(next_));
  }

  bool close(bool) override {
    bool good = true;
    for (Bucket& bucket : buckets_) good = bucket.wait();  // the last one's vote
    return good;
  }

  void present() override {
    for (Bucket& bucket : buckets_) bucket.present();
  }

  void drop_local() override {
    for (NamedTensor& p : parameters_) p.tensor.mutable_grad().reset();
  }
  void drop_reduced() override {}  // is the same gradient

  std::vector<std::string> adopt_foreign(const at::Tensor* landing) override {
    std::vector<std::string> names;
    for (Bucket& bucket : buckets_) {
      for (Slot& slot : bucket.slots()) {
        if (!slot.parameter.grad().defined() || (landing != nullptr && slot.parameter.is_same(*landing))) continue;
        if (bucket.adopt_gradient(slot)) names.push_back(slot.name);
      }
    }
    return names;
  }

  std::string find_moved() const override {
    for (const Bucket& bucket : buckets_) {
      for (const Slot& slot : bucket.slots()) {
        if (!slot.at_home()) return moved_text(slot.name);
      }
    }
    return {};
  }

  Comm norm_comm() const override { return {}; }

  std::vector<Bucket> buckets_;
  Reduction reduction_;
  size_t next_ = 0;  // first bucket not launched in this round
};

}  // namespace

std::shared_ptr<Engine> make_replicated_engine(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers, Comm comm,
                                               DataParallelOptions options) {
  return std::make_shared<ReplicatedEngine>(std::move(parameters), std::move(buffers), std::move(comm), std::move(options));
}

}  // namespace weft::parallel
