// The local back end as a world's transport: failures spread through its shared memory.
#pragma once

#include "weft/comm/local/local.h"
#include "weft/comm/transport.h"

namespace weft::detail {

class LocalTransport final : public Transport {
 public:
  explicit LocalTransport(std::shared_ptr<local::LocalWorld> world) : world_(std::move(world)) {}

  std::string name() const override { return "local"; }
  c10::intrusive_ptr<c10d::Backend> create_group(const std::vector<int>& world_ranks, const std::string& name,
                                                 const std::shared_ptr<Progress>&,
                                                 std::chrono::milliseconds timeout) override {
    return world_->create_group(world_ranks, name, timeout);
  }
  void abort(int culprit, const std::string& reason) override { world_->abort(culprit, reason); }
  std::optional<Cause> failure() override {
    if (auto abort = world_->aborted()) return Cause{std::move(abort->culprits), std::move(abort->reason)};
    return std::nullopt;
  }
  // Local calls find out by themselves; only an error of c10d's own checks comes here, and that is this rank's.
  Cause diagnose(const std::vector<int>&, const Progress&, uint64_t, const std::string& symptom) override {
    if (const auto cause = failure()) return *cause;
    world_->abort(world_->rank(), symptom);
    return failure().value_or(Cause{{world_->rank()}, symptom});
  }

 private:
  std::shared_ptr<local::LocalWorld> world_;
};

}  // namespace weft::detail
