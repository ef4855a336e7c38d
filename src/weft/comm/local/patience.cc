#include "weft/comm/local/patience.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

namespace weft::local {
namespace {

std::vector<int> list(const RankSet& set) {
  std::vector<int> ranks;
  for (size_t r = 0; r < set.size(); ++r) {
    if (set[r]) ranks.push_back(static_cast<int>(r));
  }
  return ranks;
}

std::string ranks_text(const RankSet& set) { return fmt::format("rank{} {}", set.count() > 1 ? "s" : "", fmt::join(list(set), ", ")); }

double seconds(std::chrono::steady_clock::duration d) { return std::chrono::duration<double>(d).count(); }

}  // namespace

Patience::Patience(Engine& engine, CallName name, std::chrono::milliseconds timeout, Clock::time_point start)
    : engine_(engine), page_(engine.control().page(engine.rank())), name_(name), timeout_(timeout), start_(start) {
  page_.call.store(fmt::format("{} #{} of '{}'", name.call, name.sequence, name.group));
  page_.waits.store(1);
}

Patience::~Patience() { page_.waits.store(0); }

void Patience::fail(const RankSet& culprits, const std::string& reason) {
  engine_.abort(culprits, reason);
  engine_.raise(name_, start_);
}

// Whatever is read here about a peer - it failed the world, died, left - `advance` runs once more behind it: what the peer did
// before may have completed the call. Then the call has succeeded, and which of the two was looked at first must not decide.
void Patience::check(const std::function<std::optional<HeldUp>()>& advance) {
  std::optional<HeldUp> now = advance();
  if (!now) return;
  page_.waiting_for.store(now->missing);
  engine_.live();
  if (engine_.aborted()) {
    if (advance()) engine_.raise(name_, start_);
    return;
  }

  const Control& control = engine_.control();
  RankSet dead, left;
  for (int r : list(engine_.closed_peers())) {
    if (control.page(r).left.load() == 0) dead.set(static_cast<size_t>(r));
  }
  for (int r : list(now->missing)) {
    if (control.page(r).left.load() != 0) left.set(static_cast<size_t>(r));
  }
  if (dead.any() || left.any()) now = advance();
  if (!now) return;
  if (dead.any()) fail(dead, ranks_text(dead) + " exited or " + (dead.count() > 1 ? "were" : "was") + " killed");
  left &= now->missing;
  if (left.any()) fail(left, ranks_text(left) + " left the world (its World was destroyed) without taking part in this call");
  check_deadline(*now);
}

// What a page says may be old: its rank may have been woken and not run yet. Two more signs of life in the same call say that the rank
// looked for news in between and went on waiting. When all have done so after one moment, and were in these calls before it
// already, then at that moment each waited for another of them, and none of them can ever move.
bool Patience::stands_still() {
  constexpr int kLooks = 2;
  std::map<int, Standing> now;
  RankSet visited, frontier = page_.waiting_for.load();
  visited.set(static_cast<size_t>(engine_.rank()));
  while ((frontier & ~visited).any()) {
    const RankSet ring = frontier & ~visited;
    visited |= ring;
    for (int r : list(ring)) {
      const RankPage& page = engine_.control().page(r);
      if (page.waits.load() == 0) {
        standing_.clear();
        return false;
      }
      frontier |= page.waiting_for.load();
      now[r] = {page.life.load(), page.call.load()};
    }
  }
  if (now.empty()) return false;
  const auto same_call = [](const auto& a, const auto& b) { return a.first == b.first && a.second.call == b.second.call; };
  if (!std::equal(now.begin(), now.end(), standing_.begin(), standing_.end(), same_call)) {
    standing_ = std::move(now);
    looks_ = 0;
    return false;
  }
  for (const auto& [rank, standing] : now) {
    if (standing.life < standing_.at(rank).life + 2) return false;
  }
  standing_ = std::move(now);
  return ++looks_ == kLooks;
}

Patience::Clock::duration Patience::silence(size_t rank, Clock::time_point now) {
  Seen& seen = seen_[rank];
  const uint64_t life = engine_.control().page(static_cast<int>(rank)).life.load(std::memory_order_relaxed);
  if (!seen.known) seen = {life, start_, true};
  if (seen.life != life) seen = {life, now, true};
  return now - seen.when;
}

void Patience::check_deadline(const HeldUp& held_up) {
  const RankSet& missing = held_up.missing;
  const Control& control = engine_.control();
  const Clock::time_point now = Clock::now();
  RankSet visited, silent, computing, frontier = missing;
  visited.set(static_cast<size_t>(engine_.rank()));
  std::string waiting;
  // A rank that was stopped in a wait looks as if it waited; one that lives gives a sign every slice.
  bool all_lively = true;
  while ((frontier & ~visited).any()) {
    const RankSet ring = frontier & ~visited;
    visited |= ring;
    for (int r : list(ring)) {
      const RankPage& page = control.page(r);
      if (silence(static_cast<size_t>(r), now) >= timeout_) {
        silent.set(static_cast<size_t>(r));
      } else if (page.waits.load() != 0) {
        frontier |= page.waiting_for.load();
        all_lively &= seen_[static_cast<size_t>(r)].when > start_ + timeout_;
        waiting += fmt::format("; rank {} waits in {} for {}", r, page.call.load(), ranks_text(page.waiting_for.load()));
      } else {
        computing.set(static_cast<size_t>(r));
      }
    }
  }
  const auto waited = now - start_;
  if (waited < timeout_) return;
  if (silent.any()) {
    const bool never_came = held_up.arrival && (silent & missing) == silent;
    fail(silent, fmt::format("{} {} within the deadline of {} s", ranks_text(silent),
                             never_came ? "did not arrive" : "stopped taking part (no sign of life)", seconds(timeout_)));
  }
  if (computing.none() && all_lively) {
    fail(missing, fmt::format("ranks wait for each other: rank {} in {} #{} of '{}' for {}{}", engine_.rank(), name_.call, name_.sequence,
                              name_.group, ranks_text(missing), waiting));
  }
  if (waited >= timeout_ * kLimit) {
    fail(missing, fmt::format("{} did not arrive within {} times the deadline of {} s, though active elsewhere", ranks_text(missing),
                              kLimit, seconds(timeout_)));
  }
}

}  // namespace weft::local
