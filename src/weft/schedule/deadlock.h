// The part of validation that looks at all ranks together.
#pragma once

#include <optional>

#include "weft/schedule/validate.h"

namespace weft::schedule {

/// Runs the lists without times: every rank goes on while what its next action needs is there. The fault names the
/// first rank that stays stuck and the chain of who waits for whom. The lists must have passed the checks of single
/// ranks.
std::optional<Fault> find_deadlock(const Schedule& schedule);

}  // namespace weft::schedule
