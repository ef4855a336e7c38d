#include "weft/comm/local/engine.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "weft/comm/local/patience.h"
#include "weft/core/system.h"

namespace weft::local {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

/// Spinning is the fastest wait while the peer runs on another core, and keeps it from running when it shares this one: then
/// each hand-over would cost the whole time of spinning. So a rank spins longer after it helped, and hardly when it did not;
/// it never stops altogether, or it would not notice that it helps again. More ranks than cores do not spin at all.
constexpr microseconds kSpinMost{30};
constexpr microseconds kSpinLeast{1};
/// About half a microsecond.
constexpr int kFirstLooks = 10;
/// Then yield: a futex wake-up costs 50-100 us, so that hand-overs of calls in full swing should not need one.
constexpr microseconds kYield{2000};

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

bool reached(const Op& op, Until until) { return until == Until::complete ? op.complete : op.released; }

}  // namespace

std::shared_ptr<Segment> Engine::new_control(int size) {
  auto control = Segment::create(control_bytes(size));
  control->reserve(0, control->size());
  return control;
}

Engine::Engine(std::shared_ptr<Segment> control, int rank, int size, std::unique_ptr<Links> links)
    : control_{std::move(control), rank, size}, links_(std::move(links)), blocks_(control_.segment),
      enough_cores_(size <= usable_cores()), spin_(enough_cores_ ? kSpinMost : microseconds(0)) {}

std::vector<std::shared_ptr<Engine>> Engine::in_process(int size) {
  if (size < 1 || size > kMaxRanks) throw ConfigError(fmt::format("{} ranks on one machine; the local back end takes 1 to {}", size, kMaxRanks));
  auto control = new_control(size);
  auto links = thread_links(size);
  std::vector<std::shared_ptr<Engine>> engines;
  for (int r = 0; r < size; ++r) {
    engines.push_back(std::shared_ptr<Engine>(new Engine(control, r, size, std::move(links[static_cast<size_t>(r)]))));
  }
  return engines;
}

std::shared_ptr<Engine> Engine::join(const std::string& key, int rank, int size, milliseconds timeout) {
  if (size < 1 || size > kMaxRanks) throw ConfigError(fmt::format("{} ranks on one machine; the local back end takes 1 to {}", size, kMaxRanks));
  if (rank < 0 || rank >= size) throw ConfigError(fmt::format("rank {} of {} ranks; ranks count from 0", rank, size));
  const Clock::time_point start = Clock::now();
  auto links = socket_links(key, rank, size, timeout);
  Parcel parcel;
  parcel.key = "control";
  if (rank == 0) {
    try {
      parcel.segment = new_control(size);
    } catch (const ConfigError& error) {
      parcel.error = error.what();
    }
    for (int r = 1; r < size; ++r) {
      while (!links->send(r, parcel)) std::this_thread::sleep_for(milliseconds(1));
    }
  } else {
    while (!links->receive(0, Patience::kSlice, parcel)) {
      const bool gone = links->closed().test(0);
      if (!gone && Clock::now() - start < timeout) continue;
      throw CommError({.rank = rank, .group = "world", .op = "join", .peers = {0},
                       .elapsed = std::chrono::duration_cast<milliseconds>(Clock::now() - start),
                       .cause = gone ? "rank 0 ended while the ranks were joining" : "rank 0 did not hand over the shared memory"});
    }
  }
  if (!parcel.error.empty()) throw ConfigError(parcel.error);
  return std::shared_ptr<Engine>(new Engine(std::move(parcel.segment), rank, size, std::move(links)));
}

Engine::~Engine() {
  const bool in_flight = std::any_of(active_.begin(), active_.end(), [](const auto& lane) { return lane->in_flight(); });
  if (in_flight) blocks_.keep_pages();
  for (auto& lane : active_) lane->clear();
  control_.page(rank()).left.store(1);
}

// --- failures --------------------------------------------------------------------------------------------------------------

void Engine::abort(const RankSet& culprits, std::string_view reason) {
  WorldHeader& header = control_.header();
  AbortState expected = AbortState::none;
  if (!header.abort_state.compare_exchange_strong(expected, AbortState::being_written)) return;
  header.culprits.store(culprits);
  header.reason.store(reason);
  header.abort_state.store(AbortState::set);
  for (int r = 0; r < size(); ++r) control_.wake(r);
}

std::string Engine::abort_reason() const {
  const WorldHeader& header = control_.header();
  // The writer needs a microsecond, unless it was killed in the middle of it.
  constexpr milliseconds kWriterPatience{200};
  const Clock::time_point start = Clock::now();
  while (header.abort_state.load() == AbortState::being_written) {
    if (Clock::now() - start > kWriterPatience) return "a rank was killed while it reported a failure";
    std::this_thread::yield();
  }
  return header.reason.load();
}

void Engine::raise(const CallName& name, Clock::time_point start) const {
  const std::string reason = abort_reason();
  const RankSet ranks = culprits();
  std::vector<int> peers;
  for (int r = 0; r < size(); ++r) {
    if (ranks[static_cast<size_t>(r)]) peers.push_back(r);
  }
  throw CommError({.rank = rank(), .group = std::string(name.group), .op = std::string(name.call), .sequence = name.sequence,
                   .peers = std::move(peers), .elapsed = std::chrono::duration_cast<milliseconds>(Clock::now() - start),
                   .cause = reason});
}

CallName Engine::name_of_call(const Op& op) const { return {op.lane->call_name(op), op.lane->group().name, op.sequence}; }

// --- calls -----------------------------------------------------------------------------------------------------------------

void Engine::start(Lane& lane, std::shared_ptr<Op> op) {
  live();
  Op& call = *op;
  if (aborted()) raise({lane.call_name(call), lane.group().name, lane.next_sequence()}, Clock::now());
  blocks_.sweep();
  if (lane.idle()) active_.push_back(lane.shared_from_this());
  lane.enqueue(std::move(op));
  test(call, Until::released);
}

bool Engine::drive() {
  bool moved = false;
  try {
    for (size_t i = 0; i < active_.size(); ++i) moved |= active_[i]->advance();
  } catch (const Disagreement& difference) {
    abort(difference.ranks, difference.text);
    return true;
  } catch (const ConfigError& error) {
    RankSet self;
    abort(self.set(static_cast<size_t>(rank())), fmt::format("rank {}: {}", rank(), error.what()));
    return true;
  }
  if (moved) std::erase_if(active_, [](const auto& lane) { return lane->idle(); });
  return moved;
}

void Engine::progress() {
  live();
  if (aborted()) raise({"progress", "world", 0}, Clock::now());
  drive();
}

// The world has failed, perhaps after all members had done their part of this call: then it has succeeded, and whether this
// rank had noticed must not decide.
void Engine::finish_or_raise(Op& op, Until until, Clock::time_point start) {
  drive();
  if (!reached(op, until)) raise(name_of_call(op), start);
}

bool Engine::test(Op& op, Until until) {
  if (reached(op, until)) return true;
  drive();
  if (reached(op, until)) return true;
  if (!aborted()) return false;
  finish_or_raise(op, until, Clock::now());
  return true;
}

void Engine::wait(Op& op, Until until, milliseconds timeout) {
  // In full swing the peers are here within a microsecond: no look at the clock yet.
  for (int i = 0; i < kFirstLooks; ++i) {
    if (reached(op, until)) return;
    drive();
    if (reached(op, until)) return;
    if (!enough_cores_) break;
    relax();
  }
  live();
  const Clock::time_point start = Clock::now();
  bool yielded = false;
  for (Clock::time_point now = start; now < start + kYield; now = Clock::now()) {
    const bool moved = drive();
    if (reached(op, until)) {
      if (enough_cores_) spin_ = yielded ? std::max(spin_ / 2, kSpinLeast) : std::min(spin_ * 2, kSpinMost);
      return;
    }
    if (aborted()) return finish_or_raise(op, until, start);
    if (now < start + spin_) {
      relax();
    } else if (!moved) {
      ::sched_yield();
      yielded = true;
    }
  }
  wait_long(op, until, timeout.count() > 0 ? timeout : op.timeout, start, /*unless_needed=*/false);
}

bool Engine::needed_elsewhere(const Op& op) const {
  // Who has made this call does its part of it inside whatever call it waits in.
  if (!op.lane->waits_for_arrival(op)) return false;
  const RankSet late = op.lane->missing(op);
  return std::any_of(collectives_.begin(), collectives_.end(), [&](const auto& weak) {
    const auto lane = weak.lock();
    return lane && lane->is_behind(late);
  });
}

bool Engine::wait_unless_needed(Op& op) {
  const Clock::time_point start = Clock::now();
  live();
  do {
    if (test(op, Until::complete)) return true;
    if (needed_elsewhere(op)) return false;
    ::sched_yield();
  } while (Clock::now() < start + kYield);
  return wait_long(op, Until::complete, op.timeout, start, /*unless_needed=*/true);
}

bool Engine::wait_long(Op& op, Until until, milliseconds timeout, Clock::time_point start, bool unless_needed) {
  Patience patience(*this, name_of_call(op), timeout, start);
  const auto advance = [&]() -> std::optional<Patience::HeldUp> {
    drive();
    if (reached(op, until)) return std::nullopt;
    return Patience::HeldUp{op.lane->missing(op), op.lane->waits_for_arrival(op)};
  };
  Clock::time_point checked{};
  while (!reached(op, until)) {
    if (aborted()) finish_or_raise(op, until, start);
    const Clock::time_point now = Clock::now();
    if (now - checked >= Patience::kSlice) {
      patience.check(advance);
      if (unless_needed && patience.stands_still()) return false;
      checked = now;
    }
    if (reached(op, until)) return true;
    if (unless_needed && needed_elsewhere(op)) return false;
    sleep(op, until, unless_needed);
    // Awake because something came: the next hand-over is likely to follow soon.
    for (Clock::time_point soon = Clock::now() + kYield / 10; !reached(op, until) && Clock::now() < soon;) {
      if (drive()) soon = Clock::now() + kYield / 10;
      else ::sched_yield();
      if (aborted()) break;
    }
  }
  return true;
}

// Publishers look at `sleeping` after they have published; this rank looks for news after it has set it. So one of them sees
// the other (all these accesses are sequentially consistent), and no wake-up is lost.
void Engine::sleep(Op& op, Until until, bool unless_needed) {
  RankPage& page = control_.page(rank());
  const uint32_t before = page.wake.load();
  page.sleeping.store(1);
  control_.header().sleepers.fetch_add(1);
  if (!drive() && !reached(op, until) && !aborted() && !(unless_needed && needed_elsewhere(op))) {
    const timespec slice{0, std::chrono::duration_cast<std::chrono::nanoseconds>(Patience::kSlice).count()};
    ::syscall(SYS_futex, &page.wake, FUTEX_WAIT, before, &slice, nullptr, 0);
  }
  control_.header().sleepers.fetch_sub(1);
  page.sleeping.store(0);
}

}  // namespace weft::local
