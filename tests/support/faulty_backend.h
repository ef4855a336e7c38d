// A back end that does one thing wrong, between Comm and a right one: what the engines built on Comm must not survive unseen.
#pragma once

#include <functional>
#include <string>

#include "weft/comm/world.h"

namespace weft::testing {

/// What happens to every all-reduce, reduce-scatter and all-gather of floating-point tensors with more than one element.
enum class CommFault {
  none,
  missing_reduce,       ///< the call does nothing: every rank keeps its own
  double_count,         ///< every input counts twice
  wrong_scale,          ///< the result is half of what it should be
  wrong_rank_order,     ///< the parts of the result (one per rank) stand one place off
  buffer_reused_early,  ///< the head of the input is overwritten before the peers have read it
  dropped_rank,         ///< the last rank's input counts as zeros
};

/// Which of them.
enum class CommOps { all, reductions, gathers };

/// Threads as ranks of the local back end with `fault`. The first exception of a rank ends the others and is rethrown.
void on_faulty_threads(int ranks, CommFault fault, const std::function<void(World&)>& body, CommOps ops = CommOps::all);

}  // namespace weft::testing
