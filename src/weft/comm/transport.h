// What a world needs from a back end besides moving tensors: making groups, and spreading the first failure.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace weft::detail {

/// Why a world failed: the first reason that any rank gave.
struct Cause {
  std::vector<int> culprits;  ///< world ranks at fault; may be empty when it cannot be found out
  std::string reason;
};

/// How far this rank has come in one group; read by the thread that tells peers about it.
struct Progress {
  std::string group;                 ///< key that is the same on all members and unique in the world
  std::atomic<uint64_t> started{0};  ///< collectives that this rank has called
};

/// One rank's connection to the others of its world.
class Transport {
 public:
  virtual ~Transport() = default;

  /// local, gloo, fake, or the name of the user's back end.
  virtual std::string name() const = 0;

  /// Collective over world_ranks. Null: calls are not communicated (rehearsal).
  virtual c10::intrusive_ptr<c10d::Backend> create_group(const std::vector<int>& world_ranks, const std::string& name,
                                                         const std::shared_ptr<Progress>& progress,
                                                         std::chrono::milliseconds timeout) = 0;

  /// Fails the world on all ranks; the first call of all ranks wins. Any thread.
  virtual void abort(int culprit, const std::string& reason) = 0;

  /// Whether failure() knows what happens to other ranks.
  virtual bool spreads_failures() const { return true; }

  /// The world's failure, if any. Cheap: every wait polls it.
  virtual std::optional<Cause> failure() = 0;

  /// Finds out who is to blame when collective number `sequence` of a group failed or timed out, and fails the world with
  /// that. `symptom` is what this rank saw. Takes about a second.
  virtual Cause diagnose(const std::vector<int>& world_ranks, const Progress& progress, uint64_t sequence,
                         const std::string& symptom) = 0;
};

}  // namespace weft::detail
