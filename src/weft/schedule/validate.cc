#include "weft/schedule/validate.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "weft/core/error.h"
#include "weft/schedule/deadlock.h"
#include "weft/schedule/text.h"
#include "weft/schedule/validate_ranks.h"

namespace weft::schedule {
namespace {

constexpr int kAbsent = -1;

/// What sorts of actions a schedule has beside compute; rules about a sort hold where it is used at all.
struct Sorts {
  bool transfers = false, sharding = false, reduction = false;

  static Sorts of(const Schedule& schedule) {
    Sorts sorts;
    for (const auto& list : schedule.ranks) {
      for (const Action& a : list) {
        sorts.transfers = sorts.transfers || (a.kind >= Kind::send_activation && a.kind <= Kind::recv_grad);
        sorts.sharding = sorts.sharding || a.kind == Kind::unshard || a.kind == Kind::reshard;
        sorts.reduction = sorts.reduction || a.kind == Kind::reduce;
      }
    }
    return sorts;
  }
};

/// Checks the list of one rank by itself.
class RankCheck {
 public:
  RankCheck(const Schedule& schedule, const Sorts& sorts, int rank)
      : schedule_(schedule),
        sorts_(sorts),
        rank_(rank),
        list_(schedule.ranks[static_cast<size_t>(rank)]),
        with_stage_(!schedule.one_stage_per_rank()) {
    for (auto& table : steps_) {
      table.assign(schedule.owner.size() * static_cast<size_t>(std::max(1, schedule.micro_batches)), kAbsent);
    }
    whole_.assign(schedule.owner.size(), kAbsent);
  }

  std::optional<Fault> run() {
    for (step_ = 0; step_ < static_cast<int>(list_.size()); ++step_) {
      const Action& a = list_[static_cast<size_t>(step_)];
      if (!is_legal(a) || !is_new(a) || !is_in_order(a) || !is_whole(a) || !is_pair(a)) return fault_;
    }
    for (size_t stage = 0; stage < schedule_.owner.size(); ++stage) {
      if (schedule_.owner[stage] == rank_ && !is_complete(static_cast<int>(stage))) return fault_;
    }
    return std::nullopt;
  }

 private:
  int& step_of(Kind kind, int stage, int micro_batch) {
    const int column = is_per_stage(kind) ? 0 : micro_batch;
    return steps_[static_cast<size_t>(kind)][static_cast<size_t>(stage) * static_cast<size_t>(schedule_.micro_batches) +
                                             static_cast<size_t>(column)];
  }
  int& step_of(Kind kind, const Action& a) { return step_of(kind, a.stage, a.micro_batch); }
  /// Step of the input gradient or of the weight gradient, alone or as part of B.
  int gradient_step(Kind half, int stage, int micro_batch) {
    return std::max(step_of(half, stage, micro_batch), step_of(Kind::backward, stage, micro_batch));
  }

  std::string name(const Action& a) const { return to_text(a, with_stage_); }
  std::string name(Kind kind, const Action& like) const {
    return name(Action{.kind = kind, .micro_batch = like.micro_batch, .stage = like.stage});
  }

  bool fail(int step, std::string what) {
    fault_ = Fault{rank_, step, std::move(what)};
    return false;
  }
  bool fail(std::string what) { return fail(step_, std::move(what)); }

  /// `a` needs `needed`, which has not come: says whether it comes later or never.
  bool fail_missing(const Action& a, Kind needed) {
    for (size_t later = static_cast<size_t>(step_); later < list_.size(); ++later) {
      const Action& b = list_[later];
      if (b.kind == needed && b.stage == a.stage && b.micro_batch == a.micro_batch) {
        return fail(fmt::format("{} needs {}, which comes only at step {}", name(a), name(b), later));
      }
    }
    return fail(fmt::format("{} needs {}, which is not in the list", name(a), name(needed, a)));
  }

  bool is_legal(const Action& a) {
    if (a.stage < 0 || a.stage >= schedule_.stage_count()) {
      return fail(fmt::format("{} is of stage {}, stages are 0 to {}", name(a), a.stage, schedule_.stage_count() - 1));
    }
    if (schedule_.owner[static_cast<size_t>(a.stage)] != rank_) {
      return fail(fmt::format("{} is of stage {}, which rank {} holds", name(a), a.stage,
                              schedule_.owner[static_cast<size_t>(a.stage)]));
    }
    if (!is_per_stage(a.kind) && (a.micro_batch < 0 || a.micro_batch >= schedule_.micro_batches)) {
      return fail(fmt::format("{} is of micro-batch {}, micro-batches are 0 to {}", name(a), a.micro_batch,
                              schedule_.micro_batches - 1));
    }
    if (schedule_.forward_only && is_compute(a.kind) && a.kind != Kind::forward) {
      return fail(fmt::format("{} is a backward in a schedule for evaluation", name(a)));
    }
    return true;
  }

  bool is_new(const Action& a) {
    if (a.kind == Kind::unshard || a.kind == Kind::reshard) return true;  // may come again, see is_whole
    int& seen = step_of(a.kind, a);
    int before = seen;
    if (a.kind == Kind::input_grad || a.kind == Kind::weight_grad)
      before = std::max(before, step_of(Kind::backward, a));
    if (a.kind == Kind::backward)
      before = std::max({before, step_of(Kind::input_grad, a), step_of(Kind::weight_grad, a)});
    if (before != kAbsent) {
      return fail(fmt::format("{} repeats {} of step {}", name(a), name(list_[static_cast<size_t>(before)]), before));
    }
    seen = step_;
    return true;
  }

  bool is_in_order(const Action& a) {
    const auto absent = [&](Kind kind) { return step_of(kind, a) == kAbsent; };
    switch (a.kind) {
      case Kind::forward:
        if (sorts_.transfers && comes_from_afar(a.stage - 1) && absent(Kind::recv_activation))
          return fail_missing(a, Kind::recv_activation);
        return true;
      case Kind::input_grad:
      case Kind::backward:
        if (absent(Kind::forward)) return fail_missing(a, Kind::forward);
        if (sorts_.transfers && comes_from_afar(a.stage + 1) && absent(Kind::recv_grad))
          return fail_missing(a, Kind::recv_grad);
        return true;
      case Kind::weight_grad:
        return absent(Kind::input_grad) ? fail_missing(a, Kind::input_grad) : true;
      case Kind::send_activation:
        if (!comes_from_afar(a.stage + 1))
          return fail(fmt::format("{} has nowhere to go: the next stage is on this rank or there is none", name(a)));
        return absent(Kind::forward) ? fail_missing(a, Kind::forward) : true;
      case Kind::send_grad:
        if (!comes_from_afar(a.stage - 1))
          return fail(fmt::format("{} has nowhere to go: the stage before is on this rank or there is none", name(a)));
        return gradient_step(Kind::input_grad, a.stage, a.micro_batch) == kAbsent ? fail_missing(a, Kind::input_grad)
                                                                                  : true;
      case Kind::recv_activation:
      case Kind::recv_grad: {
        const bool comes = comes_from_afar(a.stage + (a.kind == Kind::recv_grad ? 1 : -1));
        return comes ? true : fail(fmt::format("{} receives what no other rank sends", name(a)));
      }
      case Kind::reduce:
        return is_last_gradient_done(a);
      default:
        return true;
    }
  }

  /// Whether `stage` exists and is on another rank.
  bool comes_from_afar(int stage) const {
    return stage >= 0 && stage < schedule_.stage_count() && schedule_.owner[static_cast<size_t>(stage)] != rank_;
  }

  bool is_last_gradient_done(const Action& reduce) {
    for (size_t later = static_cast<size_t>(step_) + 1; later < list_.size(); ++later) {
      const Action& b = list_[later];
      if (b.stage == reduce.stage && (b.kind == Kind::weight_grad || b.kind == Kind::backward)) {
        return fail(fmt::format("{} comes before {} of step {}, which still adds to the gradient", name(reduce),
                                name(b), later));
      }
    }
    return true;
  }

  bool is_whole(const Action& a) {
    if (!sorts_.sharding) return true;
    int& whole = whole_[static_cast<size_t>(a.stage)];
    if (a.kind == Kind::unshard) {
      if (whole != kAbsent) return fail(fmt::format("{} gathers what is whole since step {}", name(a), whole));
      whole = step_;
    } else if (a.kind == Kind::reshard) {
      if (whole == kAbsent) return fail(fmt::format("{} frees parameters that are not gathered", name(a)));
      whole = kAbsent;
    } else if (is_compute(a.kind) && a.kind != Kind::weight_grad && whole == kAbsent) {
      return fail(fmt::format("{} needs the parameters of stage {}, which are not gathered", name(a), a.stage));
    }
    return true;
  }

  bool is_pair(const Action& a) {
    if (!a.with_next) return true;
    const Action* next =
        static_cast<size_t>(step_) + 1 < list_.size() ? &list_[static_cast<size_t>(step_) + 1] : nullptr;
    if (!next || next->with_next || a.kind != Kind::forward ||
        (next->kind != Kind::backward && next->kind != Kind::input_grad)) {
      return fail(fmt::format("{} is marked as a pair, but is no forward followed by a backward", name(a)));
    }
    if (next->micro_batch == a.micro_batch && next->stage == a.stage)
      return fail(fmt::format("{} cannot overlap its own backward", name(a)));
    return true;
  }

  /// After the scan: everything that has to be there was there.
  bool is_complete(int stage) {
    const int end = static_cast<int>(list_.size());
    int last_gradient = kAbsent;
    for (int j = 0; j < schedule_.micro_batches; ++j) {
      const Action like{.micro_batch = j, .stage = stage};
      const int forward = step_of(Kind::forward, stage, j);
      if (forward == kAbsent) return fail(end, fmt::format("{} is missing", name(Kind::forward, like)));
      if (sorts_.transfers && comes_from_afar(stage + 1) && step_of(Kind::send_activation, stage, j) == kAbsent) {
        return fail(forward, fmt::format("the output of {} is never sent: {} is missing", name(like),
                                         name(Kind::send_activation, like)));
      }
      if (schedule_.forward_only) continue;
      const int input = gradient_step(Kind::input_grad, stage, j), weight = gradient_step(Kind::weight_grad, stage, j);
      if (input == kAbsent)
        return fail(forward, fmt::format("{} has no backward: {} is missing", name(like), name(Kind::backward, like)));
      if (weight == kAbsent) {
        return fail(input, fmt::format("{} has no weight gradient: {} is missing", name(Kind::input_grad, like),
                                       name(Kind::weight_grad, like)));
      }
      if (sorts_.transfers && comes_from_afar(stage - 1) && step_of(Kind::send_grad, stage, j) == kAbsent) {
        return fail(input, fmt::format("the gradient of {} is never sent: {} is missing",
                                       name(list_[static_cast<size_t>(input)]), name(Kind::send_grad, like)));
      }
      last_gradient = std::max(last_gradient, weight);
    }
    const Action like{.stage = stage};
    if (sorts_.reduction && !schedule_.forward_only && step_of(Kind::reduce, stage, 0) == kAbsent) {
      return fail(last_gradient, fmt::format("the gradient of stage {} is never reduced: {} is missing", stage,
                                             name(Kind::reduce, like)));
    }
    const int gathered = whole_[static_cast<size_t>(stage)];
    return gathered == kAbsent || fail(gathered, fmt::format("{} is never freed: {} is missing",
                                                             name(Kind::unshard, like), name(Kind::reshard, like)));
  }

  const Schedule& schedule_;
  const Sorts& sorts_;
  const int rank_;
  const std::vector<Action>& list_;
  const bool with_stage_;
  int step_ = 0;
  std::array<std::vector<int>, kKinds> steps_;  // [kind][stage, micro-batch] = step, or kAbsent
  std::vector<int> whole_;                      // [stage] = step of the UNSHARD in force, or kAbsent
  std::optional<Fault> fault_;
};

}  // namespace

std::string Fault::text() const {
  return fmt::format("rank {} step {}: {}", rank, step, what);
}

std::optional<Fault> validate(const Schedule& schedule, const Limits& limits) {
  const Sorts sorts = Sorts::of(schedule);
  std::optional<Fault> first;
  for (int rank = 0; rank < schedule.rank_count(); ++rank) {
    const std::optional<Fault> fault = RankCheck(schedule, sorts, rank).run();
    if (fault && (!first || fault->step < first->step)) first = fault;
  }
  if (first) return first;
  if (auto fault = check_transfer_order(schedule)) return fault;
  if (auto fault = check_in_flight(schedule, limits.in_flight)) return fault;
  return find_deadlock(schedule);
}

void require_valid(const Schedule& schedule, const Limits& limits) {
  if (const auto fault = validate(schedule, limits)) {
    throw ConfigError(fmt::format("schedule {} is not valid: {}", schedule.name, fault->text()));
  }
}

}  // namespace weft::schedule
