// Signs of life through a store: every rank says a few times a second that it lives and how far it has come, and looks
// whether the world has failed. From this follows who is at fault when a call fails.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/comm/transport.h"

namespace weft::detail {

/// One per world rank. A thread of its own owns the store's connection: a store that does not answer stops only this
/// thread. It never touches tensors, and calls the back end for nothing but to end what waits there (end_with_world).
class Pulse {
 public:
  /// `host`: the world rank whose process serves the store; -1: somebody else does (an agent, a user's store).
  Pulse(c10::intrusive_ptr<c10d::Store> store, int rank, int size, int host);
  /// Says that this rank is done. The host waits up to a second for the others to be done, or to have seen that it is.
  ~Pulse();

  void watch(const std::shared_ptr<Progress>& progress);

  /// When the world fails the group's calls in flight are aborted: this ends waits that do not look for failures themselves.
  void end_with_world(const c10::intrusive_ptr<c10d::Backend>& group);

  /// The world's failure as far as it is known here. Cheap.
  std::optional<Cause> failure() const;

  /// Publishes a failure unless there is one already; returns the world's first one. At most about a second.
  Cause fail(Cause cause);

  /// Watches the members for a few beats and says who is at fault: without a sign of life, gone, or behind `sequence`.
  Cause blame(const std::vector<int>& world_ranks, const Progress& progress, uint64_t sequence, const std::string& symptom);

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the thread, which may be stuck in the store when this object goes
};

}  // namespace weft::detail
