#include "weft/schedule/generate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "weft/core/nearest.h"
#include "weft/schedule/passes.h"

namespace weft::schedule {
namespace {

enum class Placement { loop, v };

/// Stage s on rank s mod p (a loop), or on rank i and 2p-1-i (a V).
Schedule empty(const char* name, const Sizes& sizes, Placement placement) {
  Schedule schedule{.name = name, .micro_batches = sizes.micro_batches};
  schedule.ranks.resize(static_cast<size_t>(sizes.ranks));
  for (int stage = 0; stage < sizes.ranks * sizes.chunks; ++stage) {
    const int turn = stage % sizes.ranks;
    const bool back = placement == Placement::v && stage / sizes.ranks % 2 == 1;
    schedule.owner.push_back(back ? sizes.ranks - 1 - turn : turn);
  }
  return schedule;
}

int round_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// Slot k of rank i in the order of interleaving: groups of p micro-batches, inside a group chunk after chunk.
struct Slot {
  int chunk;
  int micro_batch;
};
Slot slot(int k, const Sizes& sizes) {
  const int group = k / (sizes.ranks * sizes.chunks);
  return {k / sizes.ranks % sizes.chunks, group * sizes.ranks + k % sizes.ranks};
}

/// 1F1B over chunks. `per_turn`: warm-up slots more for each rank that is further from the turn.
Schedule interleaved_as(const char* name, Sizes sizes, int per_turn) {
  const int wanted = sizes.micro_batches;
  // One chunk needs no groups. With several, a last group that is not full is filled up and the surplus dropped again:
  // leaving a micro-batch out removes whole dependency chains, so what remains cannot deadlock.
  if (sizes.chunks > 1) sizes.micro_batches = round_up(wanted, sizes.ranks);
  Schedule schedule = empty(name, sizes, Placement::loop);
  const int p = sizes.ranks, slots = sizes.micro_batches * sizes.chunks;
  for (int rank = 0; rank < p; ++rank) {
    std::vector<Action>& list = schedule.ranks[static_cast<size_t>(rank)];
    const int warm_up = std::min(slots, per_turn * (p - 1 - rank) + (sizes.chunks - 1) * p);
    const auto forward = [&](int k) {
      const Slot s = slot(k, sizes);
      list.push_back({Kind::forward, false, s.micro_batch, s.chunk * p + rank});
    };
    const auto backward = [&](int k) {
      const Slot s = slot(k, sizes);
      list.push_back({Kind::backward, false, s.micro_batch, (sizes.chunks - 1 - s.chunk) * p + rank});
    };
    for (int k = 0; k < warm_up; ++k) forward(k);
    for (int k = warm_up; k < slots; ++k) forward(k), backward(k - warm_up);
    for (int k = slots - warm_up; k < slots; ++k) backward(k);
  }
  keep_micro_batches(schedule, wanted);
  return schedule;
}

/// Writes one rank's list of a V schedule: chunk 0 is stage `rank`, chunk 1 stage 2p-1-rank. Each kind of action takes
/// the micro-batches of a chunk in order.
class VWriter {
 public:
  VWriter(std::vector<Action>& list, int rank, int ranks) : list_(list), stage_{rank, 2 * ranks - 1 - rank} {}

  void f(int chunk) { add(Kind::forward, chunk, forwards_[chunk]++); }
  void b(int chunk) { add(Kind::backward, chunk, backwards_[chunk]++); }
  void i(int chunk) {
    owed_.push_back({Kind::weight_grad, false, backwards_[chunk], stage_[chunk]});
    add(Kind::input_grad, chunk, backwards_[chunk]++);
  }
  /// The oldest weight gradient that is owed, of any chunk or of one.
  void w() { take(owed_.begin()); }
  void w(int chunk) {
    take(std::find_if(owed_.begin(), owed_.end(), [&](const Action& a) { return a.stage == stage_[chunk]; }));
  }
  void pair(int forward_chunk, int backward_chunk) {
    f(forward_chunk);
    list_.back().with_next = true;
    b(backward_chunk);
  }
  int forwards(int chunk) const { return forwards_[chunk]; }
  bool owes() const { return !owed_.empty(); }
  bool owes(int chunk) const {
    return std::any_of(owed_.begin(), owed_.end(), [&](const Action& a) { return a.stage == stage_[chunk]; });
  }

 private:
  void add(Kind kind, int chunk, int micro_batch) { list_.push_back({kind, false, micro_batch, stage_[chunk]}); }
  void take(std::vector<Action>::iterator it) {
    list_.push_back(*it);
    owed_.erase(it);
  }

  std::vector<Action>& list_;
  int stage_[2];
  int forwards_[2] = {0, 0};
  int backwards_[2] = {0, 0};
  std::vector<Action> owed_;
};

void repeat(int times, const auto& body) {
  for (int k = 0; k < times; ++k) body(k);
}

}  // namespace

Schedule gpipe(const Sizes& sizes) {
  Schedule schedule = empty("gpipe", sizes, Placement::loop);
  for (int rank = 0; rank < sizes.ranks; ++rank) {
    std::vector<Action>& list = schedule.ranks[static_cast<size_t>(rank)];
    for (int chunk = 0; chunk < sizes.chunks; ++chunk) {
      repeat(sizes.micro_batches, [&](int j) {
        list.push_back({Kind::forward, false, j, chunk * sizes.ranks + rank});
      });
    }
    for (int chunk = sizes.chunks - 1; chunk >= 0; --chunk) {
      repeat(sizes.micro_batches, [&](int j) {
        list.push_back({Kind::backward, false, j, chunk * sizes.ranks + rank});
      });
    }
  }
  return schedule;
}

Schedule one_f_one_b(const Sizes& sizes) {
  return interleaved_as("1f1b", sizes, 1);
}

Schedule interleaved(const Sizes& sizes) {
  return interleaved_as("interleaved", sizes, 2);
}

Schedule zb_h1(const Sizes& sizes) {
  // Input gradients alone come back in half the time, so one slot per rank is enough whatever the chunks.
  Schedule schedule = interleaved_as("zb-h1", sizes, 1);
  for (int rank = 0; rank < sizes.ranks; ++rank) split_backward(schedule.ranks[static_cast<size_t>(rank)], rank);
  return schedule;
}

Schedule zb_v(const Sizes& sizes) {
  const int p = sizes.ranks;
  // The pattern needs 2p-1 micro-batches to fill; surplus ones are dropped, as for interleaving.
  const int m = std::max(sizes.micro_batches, 2 * p - 1);
  Schedule schedule = empty("zb-v", {p, m, 2}, Placement::v);
  for (int rank = 0; rank < p; ++rank) {
    VWriter at(schedule.ranks[static_cast<size_t>(rank)], rank, p);
    const auto input_then_weight = [&](int chunk) { at.i(chunk), at.w(chunk); };
    repeat(2 * (p - rank) - 1, [&](int) { at.f(0); });
    repeat(rank, [&](int) { at.f(1), at.f(0); });
    repeat(p - rank, [&](int) { at.f(1), input_then_weight(1); });
    while (at.forwards(1) < m) {
      if (at.forwards(0) < m) at.f(0);
      input_then_weight(0);
      at.f(1);
      input_then_weight(1);
    }
    // Cool-down: input gradients first, since other ranks wait for them.
    repeat(rank, [&](int) { at.i(0), at.i(1); });
    repeat(p - rank, [&](int) { at.i(0), at.w(0); });
    while (at.owes(1)) at.w(1);
    while (at.owes(0)) at.w(0);
  }
  keep_micro_batches(schedule, sizes.micro_batches);
  return schedule;
}

Schedule dualpipe_v(const Sizes& sizes) {
  const int p = sizes.ranks;
  const int m = std::max(sizes.micro_batches, 2 * p);
  Schedule schedule = empty("dualpipe-v", {p, m, 2}, Placement::v);
  for (int rank = 0; rank < p; ++rank) {
    VWriter at(schedule.ranks[static_cast<size_t>(rank)], rank, p);
    const int behind = p - 1 - rank;  // ranks between this one and the turn of the V
    repeat(2 * behind, [&](int) { at.f(0); });
    repeat(rank + 1, [&](int) { at.f(0), at.f(1); });
    repeat(behind, [&](int) { at.i(1), at.w(), at.f(1); });
    repeat(m - 2 * p + rank + 1, [&](int k) {
      // At the turn the first backward needs the forward right before it: nothing to overlap yet.
      if (k == 0 && behind == 0) {
        at.f(0), at.b(1);
      } else {
        at.pair(0, 1);
      }
      at.pair(1, 0);
    });
    repeat(behind, [&](int) { at.b(1), at.pair(1, 0); });
    // Half-way through the remaining backwards the weight gradients start to be put off, to shorten the drain.
    repeat(2 * (rank + 1), [&](int k) { k <= rank ? at.b(1 - k % 2) : at.i(1 - k % 2); });
    repeat(behind, [&](int) { at.w(), at.i(0); });
    while (at.owes()) at.w();
  }
  keep_micro_batches(schedule, sizes.micro_batches);
  return schedule;
}

Schedule forward_only(const Sizes& sizes) {
  Sizes full = sizes;
  full.micro_batches = round_up(sizes.micro_batches, sizes.ranks);
  Schedule schedule = empty("forward", full, Placement::loop);
  schedule.forward_only = true;
  for (int rank = 0; rank < sizes.ranks; ++rank) {
    repeat(full.micro_batches * sizes.chunks, [&](int k) {
      const Slot s = slot(k, full);
      schedule.ranks[static_cast<size_t>(rank)].push_back(
          {Kind::forward, false, s.micro_batch, s.chunk * sizes.ranks + rank});
    });
  }
  keep_micro_batches(schedule, sizes.micro_batches);
  return schedule;
}

const std::vector<Generator>& generators() {
  static const std::vector<Generator> all = {
      {"gpipe", gpipe, 1, 0, "all forwards, then all backwards"},
      {"1f1b", one_f_one_b, 1, 1, "one forward, one backward: at most p micro-batches in memory"},
      {"interleaved", interleaved, 2, 0, "1F1B over several chunks per rank: bubble divided by the chunks"},
      {"zb-h1", zb_h1, 1, 0, "1F1B with weight gradients put off into the bubble, same memory"},
      {"zb-v", zb_v, 2, 2, "two chunks in a V, no idle slot when F = I = W"},
      {"dualpipe-v", dualpipe_v, 2, 2, "two chunks in a V, forwards overlapped with backwards"},
      {"forward", forward_only, 1, 0, "evaluation: forwards only"},
  };
  return all;
}

const Generator& find_generator(std::string_view name) {
  std::vector<std::string> names;
  for (const Generator& generator : generators()) {
    if (generator.name == name) return generator;
    names.emplace_back(generator.name);
  }
  throw ConfigError(fmt::format("schedule \"{}\" is unknown; legal: {} (did you mean {}?)", name,
                                fmt::join(names, ", "), nearest(name, names).front()));
}

Maker gpipe() { return maker("gpipe"); }
Maker one_f_one_b() { return maker("1f1b"); }
Maker interleaved() { return maker("interleaved"); }
Maker zb_h1() { return maker("zb-h1"); }
Maker zb_v() { return maker("zb-v"); }
Maker dualpipe_v() { return maker("dualpipe-v"); }

Maker maker(std::string_view name) {
  return [name = std::string(find_generator(name).name)](const Sizes& sizes) { return generate(name, sizes); };
}

Maker only(Schedule schedule) {
  return [schedule = std::move(schedule)](const Sizes&) { return schedule; };
}

Findings check(const Generator& generator, const Sizes& sizes, std::string_view prefix) {
  // Lists are held in memory whole; beyond this a mistyped number is likelier than a wish.
  constexpr int64_t most_actions = 1 << 26;
  Findings findings;
  const auto at_least_one = [&](std::string_view key, int value) {
    if (value < 1) findings.add(fmt::format("{}{}", prefix, key), fmt::format("is {}, must be at least 1", value));
  };
  at_least_one("ranks", sizes.ranks);
  at_least_one("microbatches", sizes.micro_batches);
  if (generator.fixed_chunks != 0 && sizes.chunks != generator.fixed_chunks) {
    findings.add(
        fmt::format("{}chunks", prefix),
        fmt::format("is {}, but {} has exactly {} per rank", sizes.chunks, generator.name, generator.fixed_chunks),
        generator.name == "1f1b" ? "interleaved is 1f1b with chunks >= 2"
                                 : fmt::format("use {}", generator.fixed_chunks));
  } else {
    at_least_one("chunks", sizes.chunks);
  }
  const double actions = 3.0 * sizes.ranks * sizes.chunks * sizes.micro_batches;
  if (findings.empty() && actions > static_cast<double>(most_actions)) {
    findings.add(fmt::format("{}microbatches", prefix),
                 fmt::format("is {}: ranks x chunks x microbatches gives {:.0f} actions, at most {} are possible",
                             sizes.micro_batches, actions, most_actions));
  }
  return findings;
}

Schedule generate(std::string_view name, const Sizes& sizes) {
  const Generator& generator = find_generator(name);
  check(generator, sizes).throw_if_any(fmt::format("schedule {}", name));
  return generator.make(sizes);
}

}  // namespace weft::schedule
