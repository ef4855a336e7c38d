#include "weft/schedule/deadlock.h"

#include <fmt/format.h>

#include <algorithm>

#include "weft/schedule/text.h"

namespace weft::schedule {
namespace {

class Progress {
 public:
  explicit Progress(const Schedule& schedule)
      : schedule_(schedule), step_(schedule.ranks.size(), 0), forward_(cells(), false), backward_(cells(), false) {}

  std::optional<Fault> run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t rank = 0; rank < step_.size(); ++rank) {
        while (advance(rank)) moved = true;
      }
    }
    std::optional<size_t> stuck;
    for (size_t rank = 0; rank < step_.size(); ++rank) {
      if (step_[rank] < schedule_.ranks[rank].size() && (!stuck || step_[rank] < step_[*stuck])) stuck = rank;
    }
    if (!stuck) return std::nullopt;
    return Fault{static_cast<int>(*stuck), static_cast<int>(step_[*stuck]), chain(*stuck)};
  }

 private:
  size_t cells() const { return schedule_.owner.size() * static_cast<size_t>(schedule_.micro_batches); }
  size_t cell(int stage, int micro_batch) const {
    return static_cast<size_t>(stage) * static_cast<size_t>(schedule_.micro_batches) + static_cast<size_t>(micro_batch);
  }

  /// What `a` needs from another stage and does not have, if anything.
  std::optional<Action> missing(const Action& a) const {
    if (a.kind == Kind::forward && a.stage > 0 && !forward_[cell(a.stage - 1, a.micro_batch)]) {
      return Action{Kind::forward, false, a.micro_batch, a.stage - 1};
    }
    const bool backward = a.kind == Kind::backward || a.kind == Kind::input_grad;
    if (backward && !schedule_.is_last(a.stage) && !backward_[cell(a.stage + 1, a.micro_batch)]) {
      return Action{Kind::backward, false, a.micro_batch, a.stage + 1};
    }
    return std::nullopt;
  }
  /// The same for a list's next entry: a pair needs the inputs of both halves.
  std::optional<Action> missing(size_t rank) const {
    const auto& list = schedule_.ranks[rank];
    std::optional<Action> needed = missing(list[step_[rank]]);
    if (!needed && list[step_[rank]].with_next) needed = missing(list[step_[rank] + 1]);
    return needed;
  }

  bool advance(size_t rank) {
    const auto& list = schedule_.ranks[rank];
    if (step_[rank] >= list.size() || missing(rank)) return false;
    const size_t together = list[step_[rank]].with_next ? 2 : 1;
    for (size_t k = 0; k < together; ++k) {
      const Action& a = list[step_[rank]++];
      // With transfers a result counts once it was sent; between stages of one rank it counts at once.
      if (a.kind == Kind::forward && (!sends(a.stage, a.stage + 1))) forward_[cell(a.stage, a.micro_batch)] = true;
      if (a.kind == Kind::send_activation) forward_[cell(a.stage, a.micro_batch)] = true;
      if ((a.kind == Kind::backward || a.kind == Kind::input_grad) && !sends(a.stage, a.stage - 1))
        backward_[cell(a.stage, a.micro_batch)] = true;
      if (a.kind == Kind::send_grad) backward_[cell(a.stage, a.micro_batch)] = true;
    }
    return true;
  }

  bool sends(int from, int to) const {
    return transfers_ && to >= 0 && to < schedule_.stage_count() &&
           schedule_.owner[static_cast<size_t>(from)] != schedule_.owner[static_cast<size_t>(to)];
  }

  /// "B0.1 waits for B0.2 of rank 2, which is stuck at F4.2 (step 7) and waits for ..." until a rank comes again.
  std::string chain(size_t rank) const {
    const bool with_stage = !schedule_.one_stage_per_rank();
    std::vector<bool> seen(step_.size(), false);
    std::string text = to_text(schedule_.ranks[rank][step_[rank]], with_stage);
    while (!seen[rank]) {
      seen[rank] = true;
      const std::optional<Action> needed = missing(rank);
      if (!needed) break;
      rank = static_cast<size_t>(schedule_.owner[static_cast<size_t>(needed->stage)]);
      text += fmt::format(" waits for {} of rank {}", to_text(*needed, with_stage), rank);
      if (step_[rank] >= schedule_.ranks[rank].size()) break;
      text += fmt::format(", which is stuck at step {}: {}", step_[rank],
                          to_text(schedule_.ranks[rank][step_[rank]], with_stage));
    }
    return "deadlock: " + text;
  }

  static bool has_transfers(const Schedule& schedule) {
    return std::any_of(schedule.ranks.begin(), schedule.ranks.end(), [](const auto& list) {
      return std::any_of(list.begin(), list.end(),
                         [](const Action& a) { return a.kind == Kind::send_activation || a.kind == Kind::send_grad; });
    });
  }

  const Schedule& schedule_;
  std::vector<size_t> step_;
  std::vector<bool> forward_, backward_;  // [stage, micro-batch] = the neighbour can have it
  const bool transfers_ = has_transfers(schedule_);
};

}  // namespace

std::optional<Fault> find_deadlock(const Schedule& schedule) {
  return Progress(schedule).run();
}

}  // namespace weft::schedule
