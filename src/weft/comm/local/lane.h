// Lane: the queue of calls that a set of ranks make together, and the protocol that moves them on. No thread of its own, never
// blocks: advance() does what is possible now.
//
// Every member publishes a descriptor of its call (stamp), from which peers check it and find its input: carried inside, in a
// shared block, or staged in rounds through two slots (filled). Peers pull what they need and say how far they are (consumed);
// all-reduce has one more hand-over in the middle (reduced). What a member wrote for call k may be overwritten when all peers
// have consumed it. Reductions run over members in order 0 .. n-1 for each element, wherever the inputs lie.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "weft/comm/local/op.h"
#include "weft/comm/local/segment.h"
#include "weft/comm/local/shared_blocks.h"
#include "weft/comm/local/shared_state.h"

namespace weft::local {

/// This rank's view of the control segment.
struct Control {
  std::shared_ptr<Segment> segment;
  int rank = 0;
  int size = 1;

  WorldHeader& header() const { return *reinterpret_cast<WorldHeader*>(segment->data()); }
  RankPage& page(int world_rank) const {
    return reinterpret_cast<RankPage*>(segment->data() + sizeof(WorldHeader))[world_rank];
  }
  /// Some rank failed the world.
  bool failed() const { return header().abort_state.load() != AbortState::none; }
  /// Wakes a rank if it sleeps. Call after publishing what it may wait for.
  void wake(int world_rank) const;
};

/// A group's memory and names, shared by its lanes.
struct GroupInfo {
  std::string name;
  std::vector<int> world_ranks;
  int me = 0;
  std::shared_ptr<Segment> segment;
};

/// Members do not make the same call. Caught by the engine, which fails the world with it.
struct Disagreement {
  RankSet ranks;
  std::string text;
};

class Lane : public std::enable_shared_from_this<Lane> {
 public:
  /// `members`: indices within the group. `offset`: of the lane's part in the group's segment.
  Lane(const Control& control, SharedBlocks& blocks, std::shared_ptr<const GroupInfo> group, std::vector<int> members,
       LaneLayout layout, size_t offset);

  void enqueue(std::shared_ptr<Op> op);
  /// True if anything moved. Throws Disagreement; ConfigError when there is no memory for staging.
  bool advance();
  bool idle() const { return queue_.empty() && unreleased_.empty(); }
  /// Some call is not finished on this rank, or a peer may still read its memory.
  bool in_flight() const { return !idle(); }
  /// Forgets all calls (the rank leaves or the world has failed).
  void clear();

  /// World ranks that the call waits for now.
  RankSet missing(const Op& op) const;
  /// Whether that is because they have not even started it.
  bool waits_for_arrival(const Op& op) const;
  /// One of these world ranks has made a call here that this rank has not.
  bool is_behind(const RankSet& world_ranks) const;
  const GroupInfo& group() const { return *group_; }
  int me() const { return me_; }
  uint64_t next_sequence() const { return next_sequence_; }
  /// "all_reduce", "send" ...
  std::string_view call_name(const Op& op) const;

 private:
  // lane.cc: the queue
  bool publish_ahead();
  void publish(Op& op);
  bool fill_ahead();
  bool step(Op& op);
  bool arrive(Op& op);
  bool all_filled(Op& op);
  bool run_round(Op& op);
  bool blocked(Op& op, Wait why, uint64_t target);
  bool blocked_on_slot(Op& op);
  bool all_consumed(uint64_t target);
  bool release_done();
  void set_consumed(uint64_t value);
  void notify() const;

  // transfer.cc: what is read from where
  bool needs(const Op& op, int member) const;
  bool has_input(const Op& op) const;
  bool pulls(const Op& op) const;
  bool in_parts(const Op& op) const;
  size_t chunk(const Op& op) const;
  size_t part_bytes(const Op& op, int part) const;
  size_t input_bytes(const Op& op) const;
  uint32_t rounds_if_staged(const Op& op) const;
  bool stages_round(const Op& op, int member) const;
  void choose_source(Op& op) const;
  void describe_input(Op& op, Descriptor& d);
  void fill(Op& op, char* slot) const;
  uint64_t part_offset(const Descriptor& d) const;
  const char* locate(const Op& op, int member) const;
  void pull(Op& op) const;
  void reduce_all(Op& op, size_t length) const;
  void reduce_own_part(Op& op) const;
  void copy_results(Op& op) const;

  // agreement.cc
  void check(const Op& op, int member) const;

  struct Span {
    size_t begin, length;
  };
  Span round_span(const Op& op, uint32_t round, size_t part_bytes) const;
  Span share(size_t length, int member) const;

  Signals& signals(int member) const { return *reinterpret_cast<Signals*>(memory_ + layout_.signals(member)); }
  Descriptor& descriptor(int member, uint64_t sequence) const {
    return reinterpret_cast<Descriptor*>(memory_ + layout_.ring(member))[sequence % kRing];
  }
  char* slot(int member, uint64_t index) const {
    return memory_ + layout_.staging(member) + (index % kSlots) * layout_.slot_bytes;
  }
  int world_rank(int member) const { return group_->world_ranks[static_cast<size_t>(members_[static_cast<size_t>(member)])]; }

  const Control& control_;
  SharedBlocks& blocks_;
  std::shared_ptr<const GroupInfo> group_;
  std::vector<int> members_;
  LaneLayout layout_;
  size_t offset_;
  char* memory_;
  int n_;
  int me_;
  RankSet ranks_;  // world ranks of the members

  uint64_t next_sequence_ = 0;
  std::deque<std::shared_ptr<Op>> queue_;       // not complete, oldest first
  std::deque<std::shared_ptr<Op>> unreleased_;  // complete, but peers still read their input
  uint64_t consumed_seen_ = 0;                  // up to here all peers had consumed when this rank last looked
  size_t published_ = 0;                        // calls of queue_ that are published
  size_t filling_ = 0;                          // index in queue_ of the call whose input is being staged
  uint64_t slots_used_ = 0;                     // staging rounds promised so far
  uint64_t slot_tag_[kSlots] = {0, 0};          // position at which all must be before the slot may be written again
  bool staging_reserved_ = false;
  bool moved_ = false;
};

}  // namespace weft::local
