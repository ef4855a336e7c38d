// One step simulated action by action, on the very schedule that the runtime executes: when everything runs, and how
// much memory each rank holds meanwhile.
#pragma once

#include <string>
#include <vector>

#include "weft/core/json.h"
#include "weft/plan/estimate.h"
#include "weft/schedule/timeline.h"

namespace weft::plan {

/// Bytes that one stage (one chunk of one rank) holds.
struct StageBytes {
  double kept = 0;             ///< activations of one micro-batch, from its F to its I or B
  double kept_for_weight = 0;  ///< of these, what W still needs after I
  double gathered = 0;         ///< whole parameters, from UNSHARD to RESHARD
  double resident = 0;         ///< always: parameters or their shard, gradients, optimizer state
};

/// Memory of one rank over time: a step function.
struct MemoryTrack {
  struct Point {
    double time;
    double bytes;  ///< from this time on
  };
  std::vector<Point> points;
  double peak = 0;
  double peak_time = 0;
};

struct Simulation {
  schedule::Timeline timeline;
  std::vector<MemoryTrack> memory;  ///< per rank
};

/// Runs a valid schedule. `bytes` holds one entry per stage, or none when memory does not matter. Thousands a second.
Simulation simulate(const schedule::Schedule& schedule, const schedule::Times& times,
                    const std::vector<StageBytes>& bytes);

/// The schedule of a job: its name, pp, chunks and micro-batches, with transfers. Throws ConfigError when the generator
/// has no such sizes.
schedule::Schedule schedule_of(const Job& job);
/// Action times of a job in seconds, from the closed-form cost model; one entry per stage.
schedule::Times times_of(const Job& job, const cost::Tuning& tuning);
/// Step time of a job whose pipeline is simulated: the closed form's terms, its bubble replaced by what the actions leave idle.
/// Long schedules are simulated over their fill, drain and some periods; the steady state between repeats.
Time simulated_time(const Job& job, const cost::Tuning& tuning);
/// Actions that simulated_time runs, for budgets.
double simulated_actions(const layout::Layout& layout);

/// Memory of a job's stages from the closed-form memory model.
std::vector<StageBytes> bytes_of(const Job& job, const cost::Tuning& tuning);

/// Chrome's trace format (chrome://tracing, Perfetto): a process per rank, a thread per stream, a counter of memory.
/// `microseconds`: length of one unit of the timeline.
Json chrome_trace(const schedule::Schedule& schedule, const Simulation& simulation, double microseconds);

}  // namespace weft::plan
