// Groups and shared blocks: what needs segments to be handed from one rank to its peers.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <unistd.h>

#include <algorithm>

#include "weft/comm/local/engine.h"
#include "weft/comm/local/patience.h"

namespace weft::local {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

LaneLayout collective_layout(int members) { return {members, kCollectiveSlot}; }
constexpr LaneLayout kMessageLayout{2, kMessageSlot};

RankSet one(int rank) {
  RankSet set;
  return set.set(static_cast<size_t>(rank));
}

}  // namespace

// Address space for everything; memory is taken when a lane or its staging is first used.
size_t Group::segment_bytes(int members) {
  const size_t n = static_cast<size_t>(members);
  return collective_layout(members).end() + n * n * kMessageLayout.end();
}

Group::Group(Engine& engine, std::shared_ptr<const GroupInfo> info) : engine_(engine), info_(std::move(info)) {
  std::vector<int> all(info_->world_ranks.size());
  for (size_t m = 0; m < all.size(); ++m) all[m] = static_cast<int>(m);
  collectives_ = std::make_shared<Lane>(engine.control(), engine.blocks(), info_, std::move(all), collective_layout(size()), 0);
}

Lane& Group::messages(int from, int to) {
  std::shared_ptr<Lane>& lane = messages_[{from, to}];
  if (!lane) {
    const size_t pair = static_cast<size_t>(from) * info_->world_ranks.size() + static_cast<size_t>(to);
    const size_t offset = collective_layout(size()).end() + pair * kMessageLayout.end();
    lane = std::make_shared<Lane>(engine_.control(), engine_.blocks(), info_, std::vector<int>{from, to}, kMessageLayout, offset);
  }
  return *lane;
}

std::shared_ptr<Group> Engine::create_group(std::vector<int> world_ranks, std::string name, milliseconds timeout) {
  const auto position = std::find(world_ranks.begin(), world_ranks.end(), rank());
  if (position == world_ranks.end()) throw ConfigError(fmt::format("group '{}': rank {} is not among its ranks {}", name, rank(), fmt::join(world_ranks, ", ")));
  RankSet members;
  for (int r : world_ranks) {
    if (r < 0 || r >= size() || members.test(static_cast<size_t>(r))) {
      throw ConfigError(fmt::format("group '{}': ranks {} must be distinct and in 0 .. {}", name, fmt::join(world_ranks, ", "), size() - 1));
    }
    members.set(static_cast<size_t>(r));
  }
  auto info = std::make_shared<GroupInfo>();
  info->me = static_cast<int>(position - world_ranks.begin());
  const std::string title = fmt::format("group {} of {}", name, fmt::join(world_ranks, ","));
  const std::string key = fmt::format("{} #{}", title, group_count_[title]++);
  const CallName call{"create_group", name, 0};
  if (aborted()) raise(call, Clock::now());

  Parcel parcel;
  parcel.key = key;
  if (info->me == 0) {
    try {
      parcel.segment = Segment::create(Group::segment_bytes(static_cast<int>(world_ranks.size())));
      parcel.segment->reserve(0, collective_layout(static_cast<int>(world_ranks.size())).control_end());
    } catch (const ConfigError& error) {
      parcel.segment = nullptr;
      parcel.error = error.what();
    }
    for (size_t m = 1; m < world_ranks.size(); ++m) send(world_ranks[m], parcel, call, timeout);
  } else {
    parcel = receive(world_ranks[0], key, call, timeout);
  }
  if (!parcel.error.empty()) throw ConfigError(fmt::format("group '{}': {}", name, parcel.error));
  info->segment = std::move(parcel.segment);
  info->name = std::move(name);
  info->world_ranks = std::move(world_ranks);
  auto group = std::make_shared<Group>(*this, std::move(info));
  std::erase_if(collectives_, [](const auto& lane) { return lane.expired(); });
  collectives_.push_back(group->collectives().weak_from_this());
  return group;
}

std::shared_ptr<SharedBlock> Engine::allocate(Group& group, size_t bytes, milliseconds timeout) {
  const GroupInfo& info = group.info();
  const std::string key = group.next_block_key();
  const CallName call{"allocate", info.name, 0};
  if (aborted()) raise(call, Clock::now());
  blocks_.sweep();
  const size_t slot = page_align(std::max<size_t>(bytes, 1));

  Parcel parcel;
  parcel.key = key;
  parcel.bytes = bytes;
  if (info.me == 0) {
    try {
      parcel.number = control_.header().next_block.fetch_add(1);
      parcel.segment = Segment::create(block_bytes(group.size(), slot));
      parcel.segment->reserve(0, parcel.segment->size());
      reinterpret_cast<BlockHeader*>(parcel.segment->data())->users.store(static_cast<uint32_t>(group.size()));
    } catch (const ConfigError& error) {
      parcel.segment = nullptr;
      parcel.error = error.what();
    }
    for (size_t m = 1; m < info.world_ranks.size(); ++m) send(info.world_ranks[m], parcel, call, timeout);
  } else {
    parcel = receive(info.world_ranks[0], key, call, timeout);
  }
  if (parcel.bytes != bytes) {
    abort(one(rank()) | one(info.world_ranks[0]),
          fmt::format("ranks disagree on this call: rank {} allocates {} bytes, rank {} allocates {}", rank(), bytes, info.world_ranks[0], parcel.bytes));
    raise(call, Clock::now());
  }
  if (!parcel.error.empty()) throw ConfigError(fmt::format("allocate in group '{}': {}", info.name, parcel.error));
  // Descriptors are scarce, and a block needs none once it is mapped. Threads share one: rank 0 of the group closes it.
  if (info.me == 0 || links_->separate_mappings()) parcel.segment->close_fd();
  RankSet members;
  for (int r : info.world_ranks) members.set(static_cast<size_t>(r));
  return blocks_.add(std::move(parcel.segment), parcel.number, members, info.me, slot);
}

void Engine::send(int peer, const Parcel& parcel, const CallName& name, milliseconds timeout) {
  const Clock::time_point start = Clock::now();
  if (links_->send(peer, parcel)) return;
  Patience patience(*this, name, timeout, start);
  bool sent = false;
  const auto advance = [&]() -> std::optional<Patience::HeldUp> {
    if (sent = sent || links_->send(peer, parcel); sent) return std::nullopt;
    return Patience::HeldUp{one(peer), false};
  };
  for (;;) {
    patience.check(advance);
    if (sent) return;
    drive();
    ::usleep(1000);
  }
}

Parcel Engine::receive(int peer, const std::string& key, const CallName& name, milliseconds timeout) {
  const Clock::time_point start = Clock::now();
  live();
  const auto take = [&](milliseconds patience) -> std::optional<Parcel> {
    if (auto found = parcels_.find({peer, key}); found != parcels_.end()) {
      Parcel parcel = std::move(found->second);
      parcels_.erase(found);
      return parcel;
    }
    Parcel parcel;
    if (!links_->receive(peer, patience, parcel)) return std::nullopt;
    if (parcel.key == key) return parcel;
    parcels_.emplace(std::pair(peer, parcel.key), std::move(parcel));
    return std::nullopt;
  };
  // The usual case, without announcing a long wait.
  if (auto parcel = take(milliseconds(2))) return *std::move(parcel);
  Patience patience(*this, name, timeout, start);
  std::optional<Parcel> got;
  const auto advance = [&]() -> std::optional<Patience::HeldUp> {
    if (got || (got = take(milliseconds(0)))) return std::nullopt;
    return Patience::HeldUp{one(peer), true};
  };
  while (!got && !(got = take(Patience::kSlice / 5))) {
    drive();
    patience.check(advance);
  }
  return *std::move(got);
}

}  // namespace weft::local
