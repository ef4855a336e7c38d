// The flight log: the last calls of one rank, in a ring, for the question "who waits for whom" after a failure.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "weft/comm/op.h"

namespace weft::detail {

/// One per world rank (ranks as threads have one each). Any thread may write or dump.
class FlightLog {
 public:
  enum class State : uint8_t { started, done, failed };

  struct Entry {
    uint64_t sequence = 0;  ///< within the group (messages: within the group's messages), from 0
    int64_t numel = 0;
    int64_t start_ns = 0;   ///< steady clock, since the log was made
    int64_t end_ns = 0;     ///< when this rank saw the end; 0: not seen yet
    int group = 0;
    int peer = -1;          ///< root, or the partner of a message, as a rank of the group
    int8_t dtype = -1;      ///< at::ScalarType; -1: none
    CommOp op = CommOp::barrier;
    State state = State::started;
  };

  explicit FlightLog(int rank);
  ~FlightLog();
  FlightLog(const FlightLog&) = delete;
  FlightLog& operator=(const FlightLog&) = delete;

  /// Returns the number under which entries name this group.
  int add_group(const std::string& key, const std::string& name, const std::vector<int>& world_ranks);
  /// Returns a ticket for end(). An entry that has left the ring is no longer updated. Sets Entry::start_ns.
  uint64_t begin(Entry entry, std::chrono::steady_clock::time_point start);
  void end(uint64_t ticket, State state);

  /// Remembers why the world failed (the first reason stays).
  void set_failure(const std::string& cause);

  /// {"rank":0, "now_us":..., "failure":"..." (if any), "groups":[{"key","name","ranks","collectives"}], "calls":[{"group" (a key),
  /// "seq","op","dtype","numel","peer","state","start_us","end_us"}]}. Times are since the world was made.
  std::string json() const;
  /// Writes json() to `flight-rank<N>.json` in the folder; the k-th later world of this process whose rank here is N too writes
  /// `flight-rank<N>.<k>.json`. Nothing when no group was made. ConfigError when the file cannot be written.
  void dump(const std::string& folder) const;
  /// dump() to the folder named by WEFT_FLIGHT_DIR; no-op when that is unset.
  void dump_on_failure() const;

 private:
  struct Group {
    std::string key;  // name, ranks, and how many had both before: the same on all members
    std::string name;
    std::vector<int> world_ranks;
    uint64_t collectives = 0;  // calls so far
  };
  static constexpr size_t kEntries = 1024;  // minutes of training at tens of calls a second; 48 KiB

  int64_t ns(std::chrono::steady_clock::time_point time) const { return std::chrono::nanoseconds(time - origin_).count(); }

  const int rank_;
  const int number_;  // of the logs of this rank in this process, from 0
  const std::chrono::steady_clock::time_point origin_ = std::chrono::steady_clock::now();
  mutable std::mutex mutex_;  // uncontended but for dumps: about 20 ns
  std::array<Entry, kEntries> ring_;
  uint64_t next_ = 0;
  std::vector<Group> groups_;
  std::string failure_;
};

}  // namespace weft::detail
