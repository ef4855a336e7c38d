#include "weft/schedule/passes.h"

#include <algorithm>
#include <deque>

#include "weft/schedule/timeline.h"

namespace weft::schedule {
namespace {

/// Erases actions; a pair that loses one half is no pair any more.
void erase_actions(std::vector<Action>& list, const auto& unwanted) {
  std::vector<Action> kept;
  kept.reserve(list.size());
  for (size_t k = 0; k < list.size(); ++k) {
    if (unwanted(list[k])) {
      if (k > 0 && list[k - 1].with_next && !kept.empty() && !unwanted(list[k - 1])) kept.back().with_next = false;
      continue;
    }
    kept.push_back(list[k]);
  }
  list = std::move(kept);
}

/// Position behind the last weight gradient of each stage that the list holds; 0 for the others.
std::vector<size_t> last_weight_gradient(const Schedule& schedule, const std::vector<Action>& list) {
  std::vector<size_t> after(schedule.owner.size(), 0);
  for (size_t k = 0; k < list.size(); ++k) {
    if (list[k].kind == Kind::backward || list[k].kind == Kind::weight_grad)
      after[static_cast<size_t>(list[k].stage)] = k + 1;
  }
  return after;
}

bool needs_parameters(const Action& a) {
  return is_compute(a.kind) && a.kind != Kind::weight_grad;
}

/// The next `count` distinct stages that need parameters from position k on.
std::vector<int> upcoming(const std::vector<Action>& list, size_t k, size_t count) {
  std::vector<int> stages;
  for (; k < list.size() && stages.size() < count; ++k) {
    if (needs_parameters(list[k]) && std::find(stages.begin(), stages.end(), list[k].stage) == stages.end())
      stages.push_back(list[k].stage);
  }
  return stages;
}

}  // namespace

void keep_micro_batches(Schedule& schedule, int count) {
  if (count >= schedule.micro_batches) return;
  for (auto& list : schedule.ranks) erase_actions(list, [&](const Action& a) { return a.micro_batch >= count; });
  schedule.micro_batches = count;
}

void split_backward(std::vector<Action>& list, int delay) {
  std::vector<Action> out;
  out.reserve(list.size() * 2);
  std::deque<Action> owed;
  const auto pay = [&] {
    out.push_back(owed.front());
    owed.pop_front();
  };
  for (const Action& action : list) {
    out.push_back(action);
    if (action.kind != Kind::backward) continue;
    out.back().kind = Kind::input_grad;
    owed.push_back({Kind::weight_grad, false, action.micro_batch, action.stage});
    if (owed.size() > static_cast<size_t>(delay)) pay();
  }
  while (!owed.empty()) pay();
  list = std::move(out);
}

void merge_backward(Schedule& schedule) {
  for (auto& list : schedule.ranks) {
    std::vector<Action> out;
    out.reserve(list.size());
    for (const Action& action : list) {
      const Action* before = out.empty() ? nullptr : &out.back();
      if (before && before->kind == Kind::input_grad && action.kind == Kind::weight_grad &&
          before->stage == action.stage && before->micro_batch == action.micro_batch) {
        out.back().kind = Kind::backward;
      } else {
        out.push_back(action);
      }
    }
    list = std::move(out);
  }
}

void add_communication(Schedule& schedule) {
  // Equal times put a transfer where it falls due when stages are balanced. A pair is one slot, never cut open.
  Times times = Times::uniform(schedule.stage_count(), 1, 1, 1);
  times.pair = 1;
  const std::vector<Span> spans = run(schedule, times).spans;

  struct Event {
    double when;
    bool starts;  // results of a moment are handed on before anything starts at it
    const Span* span;
  };
  std::vector<Event> events;
  events.reserve(spans.size() * 2);
  for (const Span& span : spans) {
    events.push_back({span.start, true, &span});
    events.push_back({span.end, false, &span});
  }
  std::stable_sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
    if (a.when != b.when) return a.when < b.when;
    if (a.starts != b.starts) return !a.starts;
    return a.span->rank != b.span->rank ? a.span->rank < b.span->rank : a.span->step < b.span->step;
  });

  std::vector<std::vector<Action>> ranks(schedule.ranks.size());
  const auto transfer = [&](const Action& done, int to_stage, Kind send, Kind receive) {
    if (to_stage < 0 || to_stage >= schedule.stage_count()) return;
    const int from = schedule.owner[static_cast<size_t>(done.stage)],
              to = schedule.owner[static_cast<size_t>(to_stage)];
    if (from == to) return;
    ranks[static_cast<size_t>(from)].push_back({send, false, done.micro_batch, done.stage});
    ranks[static_cast<size_t>(to)].push_back({receive, false, done.micro_batch, to_stage});
  };
  for (const Event& event : events) {
    const Action& action = event.span->action;
    if (event.starts) {
      ranks[static_cast<size_t>(event.span->rank)].push_back(action);
    } else if (action.kind == Kind::forward) {
      transfer(action, action.stage + 1, Kind::send_activation, Kind::recv_activation);
    } else if (action.kind != Kind::weight_grad) {
      transfer(action, action.stage - 1, Kind::send_grad, Kind::recv_grad);
    }
  }
  schedule.ranks = std::move(ranks);
}

void add_sharding(Schedule& schedule, const Sharding& sharding) {
  for (auto& list : schedule.ranks) {
    const std::vector<size_t> reduce_after = last_weight_gradient(schedule, list);
    std::vector<Action> out;
    std::vector<int> whole;
    bool in_pair = false;
    size_t over = 0;  // actions whose results are there: both halves of a pair end together
    for (size_t k = 0; k < list.size(); ++k) {
      if (is_compute(list[k].kind) && !in_pair) {
        // A pair needs the stages of both its halves at once.
        const size_t together = list[k].with_next ? 2 : 1;
        const std::vector<int> wanted =
            upcoming(list, k, std::max<size_t>(together, static_cast<size_t>(std::max(1, sharding.whole_stages))));
        const auto unused = [&](int stage) { return std::find(wanted.begin(), wanted.end(), stage) == wanted.end(); };
        for (int stage : whole) {
          if (unused(stage)) out.push_back({Kind::reshard, false, -1, stage});
        }
        std::erase_if(whole, unused);
        for (int stage : wanted) {
          if (std::find(whole.begin(), whole.end(), stage) != whole.end()) continue;
          whole.push_back(stage);
          out.push_back({Kind::unshard, false, -1, stage});
        }
      }
      in_pair = list[k].with_next;
      out.push_back(list[k]);
      // What other ranks wait for is sent first.
      const bool sends_next =
          k + 1 < list.size() && (list[k + 1].kind == Kind::send_activation || list[k + 1].kind == Kind::send_grad);
      if (in_pair || sends_next) continue;
      for (size_t stage = 0; stage < reduce_after.size(); ++stage) {
        if (reduce_after[stage] > over && reduce_after[stage] <= k + 1)
          out.push_back({Kind::reduce, false, -1, static_cast<int>(stage)});
      }
      over = k + 1;
    }
    for (int stage : whole) out.push_back({Kind::reshard, false, -1, stage});
    list = std::move(out);
  }
}

void add_reduction(Schedule& schedule) {
  add_sharding(schedule);
  for (auto& list : schedule.ranks) {
    erase_actions(list, [](const Action& a) { return a.kind == Kind::unshard || a.kind == Kind::reshard; });
  }
}

void strip_communication(Schedule& schedule) {
  for (auto& list : schedule.ranks) erase_actions(list, [](const Action& a) { return !is_compute(a.kind); });
}

}  // namespace weft::schedule
