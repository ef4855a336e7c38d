#include "weft/comm/local/shared_blocks.h"

#include <fmt/format.h>

#include "weft/core/error.h"

namespace weft::local {

void SharedBlock::release() noexcept {
  auto* world = reinterpret_cast<WorldHeader*>(control->data());
  const bool failed = world->abort_state.load() != AbortState::none;  // calls were cut short: a peer may be in mid-read
  if (!failed && may_discard->load()) segment->discard(static_cast<size_t>(mine - segment->data()), slot_bytes);
  auto* header = reinterpret_cast<BlockHeader*>(segment->data());
  if (header->users.fetch_sub(1) == 1) world->dead_blocks.fetch_add(1);
}

bool SharedBlock::dead() const noexcept { return reinterpret_cast<const BlockHeader*>(segment->data())->users.load() == 0; }

SharedBlocks::SharedBlocks(std::shared_ptr<Segment> control)
    : control_(std::move(control)),
      header_(reinterpret_cast<WorldHeader*>(control_->data())),
      may_discard_(std::make_shared<std::atomic<bool>>(true)) {}

SharedBlocks::~SharedBlocks() = default;

std::shared_ptr<SharedBlock> SharedBlocks::add(std::shared_ptr<Segment> segment, uint64_t number, RankSet members, int index,
                                               size_t slot_bytes) {
  auto block = std::make_shared<SharedBlock>();
  block->number = number;
  block->members = members;
  block->slot_bytes = slot_bytes;
  block->mine = segment->data() + page_align(sizeof(BlockHeader)) + static_cast<size_t>(index) * slot_bytes;
  block->segment = std::move(segment);
  block->control = control_;
  block->may_discard = may_discard_;
  by_address_.emplace(block->mine, block);
  by_number_.emplace(number, block);
  return block;
}

const SharedBlock* SharedBlocks::find(const void* data, size_t bytes) const {
  if (by_address_.empty()) return nullptr;
  const char* start = static_cast<const char*>(data);
  auto above = by_address_.upper_bound(start);
  if (above == by_address_.begin()) return nullptr;
  const SharedBlock* block = std::prev(above)->second.get();
  return start + bytes <= block->mine + block->slot_bytes ? block : nullptr;
}

const char* SharedBlocks::base(uint64_t number) const {
  auto found = by_number_.find(number);
  if (found == by_number_.end()) throw InternalError(fmt::format("local: shared block {} is not mapped on this rank", number));
  return found->second->base();
}

void SharedBlocks::sweep() {
  const uint64_t dead = header_->dead_blocks.load(std::memory_order_relaxed);
  if (dead == dead_seen_) return;
  dead_seen_ = dead;
  for (auto it = by_number_.begin(); it != by_number_.end();) {
    if (it->second->dead()) {
      by_address_.erase(it->second->mine);
      it = by_number_.erase(it);
    } else {
      ++it;
    }
  }
}

}  // namespace weft::local
