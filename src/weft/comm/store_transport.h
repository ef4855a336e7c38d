// gloo groups that meet in a store, with failures spread through the same store.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "weft/comm/gloo.h"
#include "weft/comm/pulse.h"
#include "weft/comm/transport.h"

namespace weft::detail {

class StoreTransport final : public Transport {
 public:
  /// `host`: see Pulse. `one_host`: all ranks share this machine.
  StoreTransport(c10::intrusive_ptr<c10d::Store> store, int rank, int size, int host, bool one_host);

  std::string name() const override { return "gloo"; }
  c10::intrusive_ptr<c10d::Backend> create_group(const std::vector<int>& world_ranks, const std::string& name,
                                                 const std::shared_ptr<Progress>& progress,
                                                 std::chrono::milliseconds timeout) override;
  void abort(int culprit, const std::string& reason) override { pulse_.fail({{culprit}, reason}); }
  std::optional<Cause> failure() override { return pulse_.failure(); }
  Cause diagnose(const std::vector<int>& world_ranks, const Progress& progress, uint64_t sequence,
                 const std::string& symptom) override {
    return pulse_.blame(world_ranks, progress, sequence, symptom);
  }

 private:
  void await_members(const std::vector<int>& world_ranks, const std::string& name, const std::string& key_base,
                     std::chrono::milliseconds timeout);

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  GlooDevices devices_;
  Pulse pulse_;
};

}  // namespace weft::detail
