// Proves a schedule before it runs: nobody waits for what never comes.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "weft/schedule/action.h"

namespace weft::schedule {

/// The first thing wrong with a schedule.
struct Fault {
  int rank = 0;
  int step = 0;      ///< position in the rank's list, from 0
  std::string what;  ///< "B3 needs F3, which comes only at step 7"

  /// "rank 1 step 5: B3 needs F3, which comes only at step 7"
  std::string text() const;
};

struct Limits {
  /// Micro-batches (with chunks: micro-batches x stages) that a rank may hold from F to the last gradient. Empty: any.
  std::vector<int> in_flight;
};

/// Checks, in this order: every action is legal where it stands; each micro-batch has one F, one input gradient and one
/// weight gradient per stage, in this order; pairs; transfers (every one sent once, received once, in the same order on
/// both sides); parameters are gathered when used; gradients are reduced once, after the last weight gradient; memory
/// in flight; and that the lists run to their ends without deadlock, a pair needing the inputs of both its halves.
/// Transfers, UNSHARD/RESHARD and REDUCE are checked when the schedule has any of that sort.
std::optional<Fault> validate(const Schedule& schedule, const Limits& limits = {});

/// Throws ConfigError with the fault, if there is one.
void require_valid(const Schedule& schedule, const Limits& limits = {});

}  // namespace weft::schedule
