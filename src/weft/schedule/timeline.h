// When every action runs, given how long each kind takes: one compute stream per rank, one stream for its transfers and
// one for the collectives of sharding. Exact and without a clock: each start is the latest of a few known times.
#pragma once

#include <vector>

#include "weft/schedule/action.h"

namespace weft::schedule {

/// Durations, in any unit (seconds, or "one F"). One entry per stage.
struct Times {
  std::vector<double> forward;
  std::vector<double> input_grad;
  std::vector<double> weight_grad;  ///< B takes input_grad + weight_grad
  std::vector<double> unshard;      ///< empty: 0
  std::vector<double> reduce;       ///< empty: 0
  double send = 0;                  ///< one activation or gradient between two ranks
  /// Duration of an overlapped pair as a share of its F + B; both results are there at its end. 0: F, then B.
  double pair = 0;

  /// The same durations on every stage.
  static Times uniform(int stages, double forward, double input_grad, double weight_grad, double send = 0);
};

enum class Stream : uint8_t { compute, transfer, collective };

struct Span {
  Action action;
  int rank = 0;
  int step = 0;  ///< position in the rank's list
  Stream stream = Stream::compute;
  double start = 0;
  double end = 0;
};

struct Timeline {
  std::vector<Span> spans;    ///< each rank's in list order; every span after those it depends on
  std::vector<double> busy;   ///< compute time per rank
  std::vector<double> first;  ///< start of a rank's first action
  std::vector<double> last;   ///< end of a rank's last compute action
  double makespan = 0;        ///< end of everything, collectives included

  double idle(int rank) const { return makespan - busy[static_cast<size_t>(rank)]; }
  /// Idle share of all ranks together, 0 to 1.
  double bubble() const;
};

/// Runs a valid schedule (see validate.h). Without SEND actions a stage on another rank gets its input `send` after it
/// was computed; with them, when the transfer is over. Transfers of one rank follow each other, receiving costs
/// nothing. Throws InternalError when the schedule cannot make progress.
Timeline run(const Schedule& schedule, const Times& times);

}  // namespace weft::schedule
