// Engine: one rank's side of the local back end, without torch. It owns the attachment to the world, creates groups, drives
// the calls in flight and waits for them. Used by one thread at a time, but for abort() and aborted().
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/comm/local/lane.h"
#include "weft/comm/local/links.h"
#include "weft/core/error.h"

namespace weft::local {

class Engine;

/// A set of ranks: one lane for collectives and, when used, one per direction and peer for messages.
class Group {
 public:
  Group(Engine& engine, std::shared_ptr<const GroupInfo> info);
  const GroupInfo& info() const { return *info_; }
  int size() const { return static_cast<int>(info_->world_ranks.size()); }
  Lane& collectives() { return *collectives_; }
  /// The lane from this rank to `peer` (a member), or from it.
  Lane& outgoing(int peer) { return messages(info_->me, peer); }
  Lane& incoming(int peer) { return messages(peer, info_->me); }
  /// Name of the next shared block, the same on all members.
  std::string next_block_key() { return info_->name + " block " + std::to_string(blocks_++); }

  static size_t segment_bytes(int members);

 private:
  Lane& messages(int from, int to);
  Engine& engine_;
  std::shared_ptr<const GroupInfo> info_;
  std::shared_ptr<Lane> collectives_;
  std::map<std::pair<int, int>, std::shared_ptr<Lane>> messages_;
  uint64_t blocks_ = 0;
};

/// Who waits, for messages.
struct CallName {
  std::string_view call;
  std::string_view group;
  uint64_t sequence = 0;
};

/// How far a call must be.
enum class Until { complete, released };

class Engine {
 public:
  static std::vector<std::shared_ptr<Engine>> in_process(int size);
  static std::shared_ptr<Engine> join(const std::string& key, int rank, int size, std::chrono::milliseconds timeout);
  ~Engine();

  int rank() const { return control_.rank; }
  int size() const { return control_.size; }
  const Control& control() const { return control_; }
  SharedBlocks& blocks() { return blocks_; }

  /// Fails the world; the first of all ranks wins. Any thread.
  void abort(const RankSet& culprits, std::string_view reason);
  bool aborted() const { return control_.failed(); }
  RankSet culprits() const { return control_.header().culprits.load(); }
  /// Text of the first abort; waits a moment for a peer that is just writing it.
  std::string abort_reason() const;

  /// Collective over the ranks. The same arguments on all of them.
  std::shared_ptr<Group> create_group(std::vector<int> world_ranks, std::string name, std::chrono::milliseconds timeout);
  /// Collective over the group: memory that all members have mapped; `bytes` in this rank's slot.
  std::shared_ptr<SharedBlock> allocate(Group& group, size_t bytes, std::chrono::milliseconds timeout);

  /// Starts a call. CommError if the world has failed.
  void start(Lane& lane, std::shared_ptr<Op> op);
  /// Moves all calls on without blocking; CommError if the world has failed.
  void progress();
  /// Whether the call is that far. Moves all calls on; CommError if it is not and the world has failed.
  bool test(Op& op, Until until);
  /// Returns when the call is that far. CommError when the world fails or `timeout` runs out (zero: the call's own).
  void wait(Op& op, Until until, std::chrono::milliseconds timeout);
  /// Waits for the call's completion unless that would never come: false when a rank that it waits for waits for this one. Known at
  /// once when such a rank has made a collective call that this rank has not, which cannot be while all make their calls in one
  /// order (of the two, this rank is ahead); else, through further ranks or messages, once no rank in the chain of those that
  /// wait for each other has moved for some slices of a long wait (Patience::stands_still). Errors as wait().
  bool wait_unless_needed(Op& op);

  /// Gives a sign of life. Only this rank writes it: no locked instruction is needed.
  void live() {
    auto& life = control_.page(rank()).life;
    life.store(life.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  /// Throws the failure of the world as this call's error.
  [[noreturn]] void raise(const CallName& name, std::chrono::steady_clock::time_point start) const;
  /// Peers that ended without saying goodbye, as far as the system tells.
  RankSet closed_peers() { return links_->closed(); }

 private:
  Engine(std::shared_ptr<Segment> control, int rank, int size, std::unique_ptr<Links> links);
  static std::shared_ptr<Segment> new_control(int size);

  bool drive();
  void finish_or_raise(Op& op, Until until, std::chrono::steady_clock::time_point start);
  bool needed_elsewhere(const Op& op) const;
  void sleep(Op& op, Until until, bool unless_needed);
  bool wait_long(Op& op, Until until, std::chrono::milliseconds timeout, std::chrono::steady_clock::time_point start,
                 bool unless_needed);
  void send(int peer, const Parcel& parcel, const CallName& name, std::chrono::milliseconds timeout);
  Parcel receive(int peer, const std::string& key, const CallName& name, std::chrono::milliseconds timeout);
  CallName name_of_call(const Op& op) const;

  Control control_;
  std::unique_ptr<Links> links_;
  SharedBlocks blocks_;
  bool enough_cores_;
  std::chrono::microseconds spin_;                        // how long a wait spins before it yields
  std::vector<std::shared_ptr<Lane>> active_;             // lanes with calls in flight
  std::vector<std::weak_ptr<Lane>> collectives_;          // of all groups
  std::map<std::string, uint64_t> group_count_;           // how often a group of this name and ranks was created
  std::map<std::pair<int, std::string>, Parcel> parcels_; // came before anybody asked
};

}  // namespace weft::local
