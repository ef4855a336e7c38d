// Shared blocks: memory that all members of a group have mapped, so that peers read it in place.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <vector>

#include "weft/comm/local/segment.h"
#include "weft/comm/local/shared_state.h"

namespace weft::local {

/// One collective allocation: a segment with one slot per member. Each member's slot is freed by itself.
struct SharedBlock {
  uint64_t number = 0;
  RankSet members;                         ///< world ranks that have it mapped
  size_t slot_bytes = 0;                   ///< whole pages
  char* mine = nullptr;                    ///< this rank's slot
  std::shared_ptr<Segment> segment;        ///< first page: BlockHeader; then the slots
  std::shared_ptr<Segment> control;        ///< the world's, for the count of dead blocks
  /// False once a peer may still read this rank's memory although this rank lets go of it (it left with calls in flight):
  /// pages are then kept until the last peer unmaps them. So they are after a failure of the world.
  std::shared_ptr<std::atomic<bool>> may_discard;

  const char* base() const { return segment->data(); }
  /// Gives this rank's slot back; on any thread, once.
  void release() noexcept;
  /// Nobody uses it any more.
  bool dead() const noexcept;
};

struct BlockHeader {
  std::atomic<uint32_t> users;  ///< members whose slot is in use
};

inline size_t block_bytes(int members, size_t slot_bytes) {
  return page_align(sizeof(BlockHeader)) + static_cast<size_t>(members) * slot_bytes;
}

/// The blocks that this rank has mapped. Used from the rank's own thread only, but for SharedBlock::release().
class SharedBlocks {
 public:
  explicit SharedBlocks(std::shared_ptr<Segment> control);
  ~SharedBlocks();

  /// Takes over a block of which this rank is member `index`.
  std::shared_ptr<SharedBlock> add(std::shared_ptr<Segment> segment, uint64_t number, RankSet members, int index, size_t slot_bytes);
  /// The block whose slot of this rank holds [data, data + bytes), or null.
  const SharedBlock* find(const void* data, size_t bytes) const;
  /// Start of a peer's block in this rank's address space. InternalError when it is not mapped.
  const char* base(uint64_t number) const;
  /// Unmaps blocks that nobody uses any more, if there are any new ones.
  void sweep();
  /// From now on no page is given back before all have unmapped it.
  void keep_pages() { may_discard_->store(false); }
  size_t count() const { return by_number_.size(); }

 private:
  std::shared_ptr<Segment> control_;
  WorldHeader* header_;
  std::shared_ptr<std::atomic<bool>> may_discard_;
  std::map<const char*, std::shared_ptr<SharedBlock>> by_address_;  // start of this rank's slot
  std::map<uint64_t, std::shared_ptr<SharedBlock>> by_number_;
  uint64_t dead_seen_ = 0;
};

}  // namespace weft::local
