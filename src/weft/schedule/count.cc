#include "weft/schedule/count.h"

#include <algorithm>

namespace weft::schedule {

InFlight in_flight(const Schedule& schedule) {
  InFlight most;
  for (const auto& list : schedule.ranks) {
    int input = 0, weight = 0, most_input = 0, most_weight = 0;
    for (const Action& a : list) {
      if (a.kind == Kind::forward) {
        most_input = std::max(most_input, ++input);
        most_weight = std::max(most_weight, ++weight);
      }
      if (a.kind == Kind::input_grad || a.kind == Kind::backward) --input;
      if (a.kind == Kind::weight_grad || a.kind == Kind::backward) --weight;
    }
    most.to_input_grad.push_back(most_input);
    most.to_weight_grad.push_back(most_weight);
  }
  return most;
}

std::optional<ClosedForm> closed_form(std::string_view name, const Sizes& sizes, const UnitTimes& t) {
  const int p = sizes.ranks, m = sizes.micro_batches, v = sizes.chunks;
  const double turns = p - 1;
  const double both = t.forward + t.input_grad + t.weight_grad;
  const bool equal = t.forward == t.input_grad && t.forward == t.weight_grad;
  const auto form = [&](double idle, const char* text, double work_of_one) {
    const double work = work_of_one * m * v;
    return ClosedForm{idle, idle / (idle + work), text};
  };
  if (name == "gpipe" && (v == 1 || m >= p)) return form(turns * both, "(p-1)(F+B)", both);
  if (name == "1f1b") return form(turns * both, "(p-1)(F+B)", both);
  if (name == "interleaved" && (v == 1 || m % p == 0))
    return form(turns * both, "(p-1)(F+B), F and B of one chunk", both);
  if (name == "zb-h1" && v == 1 && m >= p && equal)
    return form(turns * (t.forward + t.input_grad - t.weight_grad), "(p-1)(F+I-W)", both);
  if (name == "zb-v" && m >= 2 * p - 1 && equal) return form(turns * t.forward, "(p-1)F, the ranks' later start", both);
  if (name == "dualpipe-v" && m >= 2 * p && equal) return form(turns * t.forward, "(p-1)F, pairs not overlapped", both);
  if (name == "forward" && (v == 1 || m % p == 0)) return form(turns * t.forward, "(p-1)F", t.forward);
  return std::nullopt;
}

}  // namespace weft::schedule
