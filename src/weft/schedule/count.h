// Numbers about a schedule without running it: micro-batches in flight, and the bubble's closed form.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/schedule/action.h"
#include "weft/schedule/generate.h"

namespace weft::schedule {

/// The most micro-batches (counted once per stage) that a rank holds, per rank.
struct InFlight {
  std::vector<int> to_input_grad;   ///< from F to I or B: whole activations
  std::vector<int> to_weight_grad;  ///< from F to W or B: at least the inputs of the matrices
};
InFlight in_flight(const Schedule& schedule);

/// Durations of one stage (one chunk) for the closed forms.
struct UnitTimes {
  double forward = 1, input_grad = 1, weight_grad = 1;
};

struct ClosedForm {
  double idle = 0;      ///< per rank, in the unit of the times
  double fraction = 0;  ///< idle / makespan
  std::string text;     ///< "(p-1)(F+B)"
};

/// The published bubble of a generator, with equal stages and free transfers; nothing where none holds: for
/// micro-batches too few to fill the pattern, and for V schedules with unequal F, I and W.
std::optional<ClosedForm> closed_form(std::string_view name, const Sizes& sizes, const UnitTimes& times);

}  // namespace weft::schedule
