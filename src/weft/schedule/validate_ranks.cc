#include "weft/schedule/validate_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "weft/schedule/text.h"

namespace weft::schedule {

std::optional<Fault> check_transfer_order(const Schedule& schedule) {
  struct Transfer {
    bool gradient;
    int micro_batch, stage;  // stage = the receiver's
    int step;
    bool same(const Transfer& other) const {
      return gradient == other.gradient && micro_batch == other.micro_batch && stage == other.stage;
    }
  };
  std::map<std::pair<int, int>, std::vector<Transfer>> sent, received;
  for (int rank = 0; rank < schedule.rank_count(); ++rank) {
    const auto& list = schedule.ranks[static_cast<size_t>(rank)];
    for (int step = 0; step < static_cast<int>(list.size()); ++step) {
      const Action& a = list[static_cast<size_t>(step)];
      const auto owner = [&](int stage) { return schedule.owner[static_cast<size_t>(stage)]; };
      if (a.kind == Kind::send_activation)
        sent[{rank, owner(a.stage + 1)}].push_back({false, a.micro_batch, a.stage + 1, step});
      if (a.kind == Kind::send_grad)
        sent[{rank, owner(a.stage - 1)}].push_back({true, a.micro_batch, a.stage - 1, step});
      if (a.kind == Kind::recv_activation)
        received[{owner(a.stage - 1), rank}].push_back({false, a.micro_batch, a.stage, step});
      if (a.kind == Kind::recv_grad)
        received[{owner(a.stage + 1), rank}].push_back({true, a.micro_batch, a.stage, step});
    }
  }
  for (const auto& [ends, arrivals] : received) {
    const auto& departures = sent[ends];
    for (size_t k = 0; k < std::min(arrivals.size(), departures.size()); ++k) {
      if (arrivals[k].same(departures[k])) continue;
      const auto name = [&](size_t rank, int step) {
        return to_text(schedule.ranks[rank][static_cast<size_t>(step)], true);
      };
      return Fault{ends.second, arrivals[k].step,
                   fmt::format("{} is receive {} from rank {}, but that rank's send {} is {} (step {})",
                               name(static_cast<size_t>(ends.second), arrivals[k].step), k, ends.first, k,
                               name(static_cast<size_t>(ends.first), departures[k].step), departures[k].step)};
    }
  }
  return std::nullopt;
}

std::optional<Fault> check_in_flight(const Schedule& schedule, const std::vector<int>& limits) {
  for (size_t rank = 0; rank < std::min(limits.size(), schedule.ranks.size()); ++rank) {
    int held = 0;
    for (size_t step = 0; step < schedule.ranks[rank].size(); ++step) {
      const Action& a = schedule.ranks[rank][step];
      if (a.kind == Kind::backward || a.kind == Kind::weight_grad) --held;
      if (a.kind == Kind::forward && ++held > limits[rank]) {
        return Fault{static_cast<int>(rank), static_cast<int>(step),
                     fmt::format("{} makes {} micro-batches in flight, at most {} are allowed",
                                 to_text(a, !schedule.one_stage_per_rank()), held, limits[rank])};
      }
    }
  }
  return std::nullopt;
}

}  // namespace weft::schedule
