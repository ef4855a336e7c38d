#include "weft/schedule/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "weft/core/error.h"

namespace weft::schedule {
namespace {

constexpr double kNever = -1;

class Engine {
 public:
  Engine(const Schedule& schedule, const Times& times)
      : schedule_(schedule),
        times_(times),
        ranks_(schedule.ranks.size()),
        input_(cells(), kNever),
        output_grad_(cells(), kNever),
        forward_(cells(), kNever),
        backward_(cells(), kNever),
        waits_(ranks_.size(), false),
        last_grad_(schedule.owner.size(), 0),
        whole_(schedule.owner.size(), 0) {
    for (const auto& list : schedule.ranks) {
      for (const Action& action : list) {
        explicit_sends_ = explicit_sends_ || action.kind == Kind::send_activation || action.kind == Kind::send_grad;
      }
    }
    std::fill_n(input_.begin(), schedule.micro_batches, 0.0);  // the data of stage 0
    const size_t last = schedule.owner.size() - 1;
    std::fill_n(output_grad_.begin() + static_cast<std::ptrdiff_t>(cell(last, 0)), schedule.micro_batches,
                0.0);  // the loss
  }

  Timeline run() {
    const size_t total = std::accumulate(schedule_.ranks.begin(), schedule_.ranks.end(), size_t{0},
                                         [](size_t sum, const auto& list) { return sum + list.size(); });
    timeline_.spans.reserve(total);
    timeline_.busy.assign(ranks_.size(), 0);
    timeline_.first.assign(ranks_.size(), 0);
    timeline_.last.assign(ranks_.size(), 0);
    for (size_t rank = ranks_.size(); rank-- > 0;) runnable_.push_back(static_cast<int>(rank));
    while (!runnable_.empty()) {
      const int rank = runnable_.back();
      runnable_.pop_back();
      waits_[static_cast<size_t>(rank)] = false;
      advance(rank);
    }
    if (timeline_.spans.size() != total) {
      throw InternalError(fmt::format(
          "schedule {} cannot make progress: run() needs a schedule that validate() accepts", schedule_.name));
    }
    return std::move(timeline_);
  }

 private:
  struct RankState {
    size_t step = 0;
    double compute = 0, transfer = 0, collective = 0;  // when each stream is free
  };

  size_t cells() const { return schedule_.owner.size() * static_cast<size_t>(schedule_.micro_batches); }
  size_t cell(size_t stage, int micro_batch) const {
    return stage * static_cast<size_t>(schedule_.micro_batches) + static_cast<size_t>(micro_batch);
  }
  size_t cell(const Action& a) const { return cell(static_cast<size_t>(a.stage), a.micro_batch); }

  void advance(int rank) {
    RankState& state = ranks_[static_cast<size_t>(rank)];
    const std::vector<Action>& list = schedule_.ranks[static_cast<size_t>(rank)];
    while (state.step < list.size()) {
      const Action& action = list[state.step];
      const bool fused = action.with_next && times_.pair > 0 && state.step + 1 < list.size();
      const bool done = fused                     ? compute_pair(rank, state, action, list[state.step + 1])
                        : is_compute(action.kind) ? compute(rank, state, action)
                                                  : communicate(rank, state, action);
      if (!done) {
        waits_[static_cast<size_t>(rank)] = true;
        return;
      }
      state.step += fused ? 2 : 1;
    }
  }

  /// When the data that an action needs is there, or kNever.
  double ready(const Action& a) const {
    switch (a.kind) {
      case Kind::forward:
        return std::max(input_[cell(a)], input_[cell(a)] == kNever ? kNever : whole_[static_cast<size_t>(a.stage)]);
      case Kind::input_grad:
      case Kind::backward: {
        const double gradient = output_grad_[cell(a)], saved = forward_[cell(a)];
        if (gradient == kNever || saved == kNever) return kNever;
        return std::max({gradient, saved, whole_[static_cast<size_t>(a.stage)]});
      }
      default:
        return backward_[cell(a)];
    }
  }

  double duration(const Action& a) const {
    const size_t stage = static_cast<size_t>(a.stage);
    switch (a.kind) {
      case Kind::forward:
        return times_.forward[stage];
      case Kind::input_grad:
        return times_.input_grad[stage];
      case Kind::weight_grad:
        return times_.weight_grad[stage];
      default:
        return times_.input_grad[stage] + times_.weight_grad[stage];
    }
  }

  bool compute(int rank, RankState& state, const Action& action) {
    const double from = ready(action);
    if (from == kNever) return false;
    const double start = std::max(state.compute, from);
    finish(rank, state, action, state.step, start, start + duration(action));
    return true;
  }

  bool compute_pair(int rank, RankState& state, const Action& a, const Action& b) {
    const double from_a = ready(a), from_b = ready(b);
    if (from_a == kNever || from_b == kNever) return false;
    const double start = std::max({state.compute, from_a, from_b});
    const double end = start + times_.pair * (duration(a) + duration(b));
    finish(rank, state, a, state.step, start, end);
    finish(rank, state, b, state.step + 1, start, end);
    return true;
  }

  void finish(int rank, RankState& state, const Action& action, size_t step, double start, double end) {
    const size_t r = static_cast<size_t>(rank);
    if (timeline_.busy[r] == 0 && state.compute == 0) timeline_.first[r] = start;
    timeline_.busy[r] += end - std::max(start, state.compute);
    state.compute = timeline_.last[r] = end;
    record({action, rank, static_cast<int>(step), Stream::compute, start, end});
    const size_t stage = static_cast<size_t>(action.stage);
    if (action.kind == Kind::forward) {
      forward_[cell(action)] = end;
      if (!schedule_.is_last(action.stage)) deliver(rank, input_, stage + 1, action.micro_batch, end);
    } else if (action.kind != Kind::weight_grad) {
      backward_[cell(action)] = end;
      if (stage > 0) deliver(rank, output_grad_, stage - 1, action.micro_batch, end);
    }
    if (action.kind == Kind::backward || action.kind == Kind::weight_grad) last_grad_[stage] = end;
  }

  /// Hands a result on at once where no SEND will do it.
  void deliver(int rank, std::vector<double>& to, size_t stage, int micro_batch, double end) {
    const bool local = schedule_.owner[stage] == rank;
    if (local) to[cell(stage, micro_batch)] = end;
    if (!local && !explicit_sends_) arrive(to, stage, micro_batch, end + times_.send);
  }

  void arrive(std::vector<double>& to, size_t stage, int micro_batch, double when) {
    to[cell(stage, micro_batch)] = when;
    const int owner = schedule_.owner[stage];
    if (waits_[static_cast<size_t>(owner)]) runnable_.push_back(owner), waits_[static_cast<size_t>(owner)] = false;
  }

  bool communicate(int rank, RankState& state, const Action& a) {
    const size_t stage = static_cast<size_t>(a.stage);
    const auto on = [&](Stream stream, double& free, double from, double length) {
      const double start = std::max(free, from);
      free = start + length;
      record({a, rank, static_cast<int>(state.step), stream, start, free});
      return free;
    };
    switch (a.kind) {
      case Kind::send_activation:
        arrive(input_, stage + 1, a.micro_batch, on(Stream::transfer, state.transfer, forward_[cell(a)], times_.send));
        break;
      case Kind::send_grad:
        arrive(output_grad_, stage - 1, a.micro_batch,
               on(Stream::transfer, state.transfer, backward_[cell(a)], times_.send));
        break;
      case Kind::unshard: {
        const double length = times_.unshard.empty() ? 0 : times_.unshard[stage];
        whole_[stage] = on(Stream::collective, state.collective, state.compute, length);
        break;
      }
      case Kind::reduce: {
        const double length = times_.reduce.empty() ? 0 : times_.reduce[stage];
        on(Stream::collective, state.collective, last_grad_[stage], length);
        break;
      }
      default: {  // posting a receive and freeing parameters take no time
        double now = state.compute;
        on(a.kind == Kind::reshard ? Stream::collective : Stream::transfer, now, now, 0);
      }
    }
    return true;
  }

  void record(const Span& span) {
    timeline_.makespan = std::max(timeline_.makespan, span.end);
    timeline_.spans.push_back(span);
  }

  const Schedule& schedule_;
  const Times& times_;
  std::vector<RankState> ranks_;
  std::vector<double> input_, output_grad_;  // [stage, micro-batch] when they reached the rank of the stage
  std::vector<double> forward_, backward_;   // [stage, micro-batch] when they were computed
  std::vector<bool> waits_;
  std::vector<int> runnable_;
  std::vector<double> last_grad_;  // [stage] end of the latest weight gradient
  std::vector<double> whole_;      // [stage] when the parameters are gathered
  bool explicit_sends_ = false;
  Timeline timeline_;
};

}  // namespace

Times Times::uniform(int stages, double forward, double input_grad, double weight_grad, double send) {
  const size_t n = static_cast<size_t>(stages);
  Times times;
  times.forward.assign(n, forward);
  times.input_grad.assign(n, input_grad);
  times.weight_grad.assign(n, weight_grad);
  times.send = send;
  return times;
}

double Timeline::bubble() const {
  const double work = std::accumulate(busy.begin(), busy.end(), 0.0);
  const double span = makespan * static_cast<double>(busy.size());
  return span > 0 ? (span - work) / span : 0;
}

Timeline run(const Schedule& schedule, const Times& times) {
  if (schedule.owner.empty()) return {};
  return Engine(schedule, times).run();
}

}  // namespace weft::schedule
