// Rules that hold between ranks, and limits on what a rank holds: the parts of validate() that look at whole lists.
#pragma once

#include <optional>
#include <vector>

#include "weft/schedule/validate.h"

namespace weft::schedule {

/// Sends and receives between two ranks are matched by their order, so both sides must agree on it.
std::optional<Fault> check_transfer_order(const Schedule& schedule);

/// Micro-batches between their forward and their last backward action, rank by rank, against `limits`.
std::optional<Fault> check_in_flight(const Schedule& schedule, const std::vector<int>& limits);

}  // namespace weft::schedule
