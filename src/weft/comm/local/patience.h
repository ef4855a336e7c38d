// Patience: what a rank does while a call takes long: says whom it waits for, notices the dead, and knows when to give up.
#pragma once

#include <array>
#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "weft/comm/failure_look.h"
#include "weft/comm/local/engine.h"

namespace weft::local {

/// Exists while a rank is in a long wait. Peers follow `waits for` from rank to rank, so that a deadline blames who holds
/// everybody up and not who is held up.
class Patience {
 public:
  using Clock = std::chrono::steady_clock;

  Patience(Engine& engine, CallName name, std::chrono::milliseconds timeout, Clock::time_point start);
  ~Patience();

  /// Whom a call waits for, and whether because they have not started it.
  struct HeldUp {
    RankSet missing;
    bool arrival = false;
  };

  /// Call at least every kSlice. Throws CommError, after failing the world, when a peer died, when one that is needed left,
  /// or when the deadline passed: `timeout` without a sign of life of a rank that this one waits for, directly or through
  /// others; or ranks that wait for each other; or kLimit times the timeout in all. And when another rank failed the world.
  /// `advance` moves the call on and says what still holds it up; nothing once it is done.
  void check(const std::function<std::optional<HeldUp>()>& advance);

  /// Ask after check(). True once it is certain that the ranks that this one waits for, directly or through others, all wait for each
  /// other or for this one: twice in a row each of them has looked again, and is in the same call as before. For a wait that can
  /// be given up; others end at their deadline.
  bool stands_still();

  static constexpr std::chrono::milliseconds kSlice = detail::kFailureLook / 8;
  static constexpr int kLimit = 10;

 private:
  struct Seen {
    uint64_t life = 0;
    Clock::time_point when;
    bool known = false;
  };
  /// A rank in a long wait.
  struct Standing {
    uint64_t life = 0;
    std::string call;
  };
  Clock::duration silence(size_t rank, Clock::time_point now);
  [[noreturn]] void fail(const RankSet& culprits, const std::string& reason);
  void check_deadline(const HeldUp& held_up);

  Engine& engine_;
  RankPage& page_;
  CallName name_;
  std::chrono::milliseconds timeout_;
  Clock::time_point start_;
  std::array<Seen, kMaxRanks> seen_{};
  std::map<int, Standing> standing_;  // as of the last look of stands_still() that counted
  int looks_ = 0;                     // that counted
};

}  // namespace weft::local
