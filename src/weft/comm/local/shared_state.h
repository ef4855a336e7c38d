// What lies in shared memory: the world's control segment and a group's lanes. Plain layout, the same in every process.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <string>
#include <string_view>

#include "weft/comm/local/types.h"

namespace weft::local {

/// Changes with every change of the layouts below; ranks with another number refuse each other.
inline constexpr uint32_t kLayoutVersion = 1;

/// Two cache lines: what one rank writes and others poll shares no (prefetched pair of) lines with other data.
inline constexpr size_t kLine = 128;

/// A set of ranks that is written by one and read by others; readers may see a mixture of two values for a moment.
struct SharedRankSet {
  std::array<std::atomic<uint64_t>, kMaxRanks / 64> words;

  void store(const RankSet& set) {
    for (size_t w = 0; w < words.size(); ++w) {
      uint64_t bits = 0;
      for (size_t b = 0; b < 64; ++b) bits |= static_cast<uint64_t>(set[w * 64 + b]) << b;
      words[w].store(bits);
    }
  }
  RankSet load() const {
    RankSet set;
    for (size_t w = 0; w < words.size(); ++w) {
      const uint64_t bits = words[w].load();
      for (size_t b = 0; b < 64; ++b) set[w * 64 + b] = (bits >> b) & 1;
    }
    return set;
  }
};

/// Text of at most N - 1 bytes (longer ones are cut), as atomic words: a reader may see a mixture, but never a data race.
template <size_t N>
struct SharedText {
  static_assert(N % 8 == 0);
  std::array<std::atomic<uint64_t>, N / 8> words;

  void store(std::string_view text) {
    char buffer[N] = {};
    std::memcpy(buffer, text.data(), std::min(text.size(), N - 1));
    for (size_t w = 0; w < words.size(); ++w) {
      uint64_t bits;
      std::memcpy(&bits, buffer + w * 8, 8);
      words[w].store(bits, std::memory_order_relaxed);
    }
  }
  std::string load() const {
    char buffer[N];
    for (size_t w = 0; w < words.size(); ++w) {
      const uint64_t bits = words[w].load(std::memory_order_relaxed);
      std::memcpy(buffer + w * 8, &bits, 8);
    }
    buffer[N - 1] = '\0';
    return buffer;
  }
};

enum class AbortState : uint32_t { none, being_written, set };

/// Head of the control segment.
struct WorldHeader {
  alignas(kLine) std::atomic<AbortState> abort_state;
  std::atomic<uint32_t> sleepers;       ///< ranks that sleep in a futex; publishers look no further when it is 0
  std::atomic<uint64_t> dead_blocks;    ///< counts shared blocks that nobody uses any more
  std::atomic<uint64_t> next_block;     ///< number of the next shared block
  SharedRankSet culprits;
  SharedText<1024> reason;
};

/// One per rank, behind the head.
struct RankPage {
  alignas(kLine) std::atomic<uint64_t> life;  ///< counts calls, and slices of a long wait: signs of life
  alignas(kLine) std::atomic<uint32_t> wake;  ///< futex word; bumped by whoever wakes the rank
  std::atomic<uint32_t> sleeping;
  std::atomic<uint32_t> left;                 ///< ended in order: its end-of-file is no failure
  std::atomic<uint32_t> waits;                ///< in a long wait, for the ranks in waiting_for, in `call`
  SharedRankSet waiting_for;
  SharedText<128> call;
};

inline size_t control_bytes(int ranks) { return sizeof(WorldHeader) + static_cast<size_t>(ranks) * sizeof(RankPage); }

// --- lanes ----------------------------------------------------------------------------------------------------------------
// A lane is a queue of calls, the same on all its members: one per group for collectives, and one per ordered pair of ranks
// for messages. Counters only grow; a position in the queue is tag(call's number, rounds of it).

inline constexpr int kRoundBits = 24;
constexpr uint64_t tag(uint64_t sequence, uint64_t rounds) { return (sequence << kRoundBits) | rounds; }
constexpr uint64_t finished(uint64_t sequence) { return tag(sequence + 1, 0); }

/// Written by one member, read by all.
struct Signals {
  alignas(kLine) std::atomic<uint64_t> filled;   ///< staged rounds that may be read
  std::atomic<uint64_t> reduced;                 ///< all-reduce: rounds whose part of this member holds the result
  alignas(kLine) std::atomic<uint64_t> consumed; ///< up to here this member reads nothing of its peers any more
};

enum class Call : uint8_t { barrier, all_reduce, reduce, all_gather, reduce_scatter, all_to_all, broadcast, message };

constexpr std::string_view name_of(Call call) {
  constexpr std::string_view names[] = {"barrier",        "all_reduce", "reduce",    "all_gather",
                                        "reduce_scatter", "all_to_all", "broadcast", "message"};
  return names[static_cast<size_t>(call)];
}

/// Where the input of a member lies: nowhere, in the descriptor, in a shared block, or in staging slots round by round.
enum class Source : uint8_t { none, carried, shared, staged };

/// Inputs up to this size travel inside the descriptor: one hand-over, no staging. Bytes.
inline constexpr size_t kInlineBytes = 4096;

/// What a member says about its call: enough to check that all make the same call, and to find its input.
struct Descriptor {
  alignas(64) std::atomic<uint64_t> stamp;  ///< sequence + 1 once the rest is valid
  Call call;
  Dtype dtype;
  Reduce reduce;
  Source source;
  int32_t root;       ///< root, or the tag of a message
  uint64_t count;     ///< elements as the call counts them
  uint32_t rounds;    ///< rounds that the input takes when it is cut up, be it staged or because others are
  uint32_t first_slot;
  uint64_t block;     ///< shared: number of the block
  uint64_t offset;    ///< shared: bytes from the start of the block
  char payload[kInlineBytes + 16];  ///< all_to_all: bytes for each member first (uint64 each); then the inline input
};
static_assert(offsetof(Descriptor, payload) == 48);

/// Calls that a member may be ahead of the slowest one before it has to wait.
inline constexpr uint64_t kRing = 8;
/// Staging slots of a member: one is filled while the other is read.
inline constexpr uint64_t kSlots = 2;
/// Bytes of a staging slot. Large, so that a busy machine pays for few hand-overs (64 KiB was slower than Gloo there).
inline constexpr size_t kCollectiveSlot = 1 << 20;
inline constexpr size_t kMessageSlot = 256 << 10;

/// Offsets within a lane's part of the group segment.
struct LaneLayout {
  int members;
  size_t slot_bytes;

  size_t signals(int member) const { return static_cast<size_t>(member) * sizeof(Signals); }
  size_t ring(int member) const { return signals(members) + static_cast<size_t>(member) * kRing * sizeof(Descriptor); }
  size_t control_end() const { return (ring(members) + 4095) / 4096 * 4096; }
  size_t staging(int member) const { return control_end() + static_cast<size_t>(member) * kSlots * slot_bytes; }
  size_t end() const { return staging(members); }
};

}  // namespace weft::local
