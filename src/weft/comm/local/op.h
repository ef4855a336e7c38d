// Op: one call of one rank, from its start until no peer needs its memory any more.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "weft/comm/local/shared_state.h"

namespace weft::local {

class Lane;

/// What an unfinished call waits for.
enum class Wait : uint8_t { nothing, ring, arrival, filling, drained, reduction, slot };

/// Derive to keep tensors alive with it.
struct Op {
  virtual ~Op() = default;
  /// Runs when the output is valid, before anybody is told.
  virtual void on_complete() {}

  // What is asked. Set before Engine::start().
  Call call = Call::barrier;
  Dtype dtype = Dtype::other;
  Reduce reduction = Reduce::none;
  int root = 0;                ///< member of the group; for a message its tag
  uint64_t count = 0;          ///< elements: of the whole tensor, of all_gather's input, of reduce_scatter's output; 0 for all_to_all
  size_t bytes = 0;            ///< the same in bytes
  const char* input = nullptr;
  char* output = nullptr;      ///< all_reduce and reduce work in place: the same as input
  std::vector<uint64_t> send_bytes;     ///< all_to_all: to each member, in their order in input
  std::vector<uint64_t> receive_bytes;  ///< all_to_all: from each member
  std::chrono::milliseconds timeout{0};

  // How far it is. Owned by the lane.
  std::shared_ptr<Lane> lane;
  uint64_t sequence = 0;
  Source source = Source::none;
  bool complete = false;       ///< the output is valid
  bool released = false;       ///< and no peer reads the input any more
  Wait waits = Wait::nothing;
  uint64_t target = 0;         ///< counter value that it waits for
  uint32_t my_rounds = 0;      ///< staged rounds of this rank's input
  uint32_t next_fill = 0;
  uint32_t rounds = 0;         ///< rounds that the longest part of all members takes; 0 when nobody stages
  bool any_staged = false;
  bool in_place = false;       ///< some member's input is read in that member's own memory
  uint32_t round = 0;
  int arrived = 0;             ///< members 0 .. arrived-1 have been seen, or are not needed
  bool gathered = false;
  bool reduced = false;        ///< all_reduce: this rank's part of the current round is there
  std::vector<uint64_t> peer_offsets;   ///< all_to_all: where this rank's part starts in each member's input
};

}  // namespace weft::local
