// Worlds without means to spread failures: a rehearsal, and one back end that the user made.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <mutex>

#include "weft/comm/transport.h"
#include "weft/core/error.h"

namespace weft::detail {

/// Failures are known to this rank only.
class LonelyTransport : public Transport {
 public:
  bool spreads_failures() const override { return false; }
  void abort(int culprit, const std::string& reason) override {
    std::lock_guard lock(mutex_);
    if (!failure_) failure_ = Cause{{culprit}, reason};
  }
  std::optional<Cause> failure() override {
    std::lock_guard lock(mutex_);
    return failure_;
  }
  Cause diagnose(const std::vector<int>&, const Progress&, uint64_t, const std::string& symptom) override {
    return failure().value_or(Cause{{}, symptom});
  }

 private:
  std::mutex mutex_;
  std::optional<Cause> failure_;
};

/// Nothing is communicated, everything is checked and counted.
class FakeTransport final : public LonelyTransport {
 public:
  std::string name() const override { return "fake"; }
  c10::intrusive_ptr<c10d::Backend> create_group(const std::vector<int>&, const std::string&, const std::shared_ptr<Progress>&,
                                                 std::chrono::milliseconds) override {
    return nullptr;
  }
};

/// World::from_backend: the one group is given.
class GivenTransport final : public LonelyTransport {
 public:
  explicit GivenTransport(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}

  std::string name() const override { return backend_->getBackendName(); }
  c10::intrusive_ptr<c10d::Backend> create_group(const std::vector<int>& world_ranks, const std::string& group,
                                                 const std::shared_ptr<Progress>&,
                                                 std::chrono::milliseconds) override {
    const bool all = static_cast<int>(world_ranks.size()) == backend_->getSize();
    if (all && std::is_sorted(world_ranks.begin(), world_ranks.end())) return backend_;
    throw ConfigError(fmt::format("group '{}': a world made from one back end ('{}') has one group, all {} ranks in their order; "
                                  "for others make the world from a store (World::from_store)", group, name(),
                                  backend_->getSize()));
  }

 private:
  c10::intrusive_ptr<c10d::Backend> backend_;
};

}  // namespace weft::detail
