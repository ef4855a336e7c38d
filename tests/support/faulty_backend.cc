#include "tests/support/faulty_backend.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>

#include <exception>
#include <mutex>
#include <thread>

#include "tests/support/ranks.h"
#include "weft/comm/local/local.h"

namespace weft::testing {
namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

struct Done final : c10d::Work {
  bool wait(std::chrono::milliseconds) override { return true; }
  bool isCompleted() override { return true; }
};

class FaultyBackend final : public c10d::Backend {
 public:
  FaultyBackend(c10::intrusive_ptr<c10d::Backend> right, CommFault fault, CommOps ops)
      : c10d::Backend(right->getRank(), right->getSize()), right_(std::move(right)), fault_(fault), ops_(ops) {}
  const std::string getBackendName() const override { return "faulty"; }

  Work allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    at::Tensor& tensor = tensors[0];
    if (!strikes(tensor, CommOps::reductions)) return right_->allreduce(tensors, options);
    if (fault_ == CommFault::missing_reduce) return done();
    spoil_input(tensor);
    right_->allreduce(tensors, options)->wait();
    if (fault_ == CommFault::double_count) tensor.mul_(2);
    spoil_output(tensor);
    return done();
  }

  Work _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    if (!strikes(in, CommOps::reductions)) return right_->_reduce_scatter_base(out, in, options);
    at::Tensor sent = in.clone();
    if (fault_ == CommFault::wrong_rank_order) sent = parts_moved(sent);
    if (fault_ == CommFault::missing_reduce) {
      out.copy_(in.view({getSize(), -1})[getRank()].view(out.sizes()));
      return done();
    }
    spoil_input(sent);
    right_->_reduce_scatter_base(out, sent, options)->wait();
    if (fault_ == CommFault::double_count) out.mul_(2);
    if (fault_ == CommFault::wrong_scale) out.mul_(0.5);
    return done();
  }

  Work _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    if (!strikes(in, CommOps::gathers)) return right_->_allgather_base(out, in, options);
    if (fault_ == CommFault::missing_reduce) return done();
    at::Tensor sent = in.clone();
    spoil_input(sent);
    right_->_allgather_base(out, sent, options)->wait();
    spoil_output(out);
    return done();
  }

  Work broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return right_->broadcast(tensors, options);
  }
  Work alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_rows, std::vector<int64_t>& in_rows,
                     const c10d::AllToAllOptions& options) override {
    return right_->alltoall_base(out, in, out_rows, in_rows, options);
  }
  Work send(std::vector<at::Tensor>& tensors, int peer, int tag) override { return right_->send(tensors, peer, tag); }
  Work recv(std::vector<at::Tensor>& tensors, int peer, int tag) override { return right_->recv(tensors, peer, tag); }
  Work barrier(const c10d::BarrierOptions& options) override { return right_->barrier(options); }

 private:
  static Work done() { return c10::make_intrusive<Done>(); }
  bool strikes(const at::Tensor& tensor, CommOps op) const {
    return fault_ != CommFault::none && (ops_ == CommOps::all || ops_ == op) && tensor.is_floating_point() && tensor.numel() > 1;
  }
  void spoil_input(at::Tensor& tensor) const {
    at::Tensor flat = tensor.view({-1});
    if (fault_ == CommFault::buffer_reused_early && getRank() == 0) flat.narrow(0, 0, (flat.numel() + 3) / 4).zero_();
    if (fault_ == CommFault::dropped_rank && getRank() == getSize() - 1) flat.zero_();
  }
  void spoil_output(at::Tensor& tensor) const {
    if (fault_ == CommFault::wrong_scale) tensor.mul_(0.5);
    if (fault_ == CommFault::wrong_rank_order) tensor.copy_(parts_moved(tensor));
  }
  at::Tensor parts_moved(const at::Tensor& tensor) const {
    const at::Tensor flat = tensor.view({-1});
    const int64_t part = std::max<int64_t>(flat.numel() / getSize(), 1);
    return at::cat({flat.narrow(0, part, flat.numel() - part), flat.narrow(0, 0, part)}).view(tensor.sizes());
  }

  c10::intrusive_ptr<c10d::Backend> right_;
  CommFault fault_;
  CommOps ops_;
};

}  // namespace

void on_faulty_threads(int ranks, CommFault fault, const std::function<void(World&)>& body, CommOps ops) {
  auto worlds = local::LocalWorld::in_process(ranks);
  std::vector<int> all(static_cast<size_t>(ranks));
  for (int r = 0; r < ranks; ++r) all[static_cast<size_t>(r)] = r;
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r, mine = std::move(worlds[static_cast<size_t>(r)])] {
      try {
        const auto group = mine->create_group(all, "world", kTestTimeout);
        World world = World::from_backend(c10::make_intrusive<FaultyBackend>(group, fault, ops), {.timeout = kTestTimeout});
        body(world);
      } catch (const std::exception& e) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
        mine->abort(r, e.what());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace weft::testing
