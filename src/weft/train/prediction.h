// What a run will need, said before it starts: memory from a rehearsal, time from the planner and a measured machine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "weft/comm/world.h"
#include "weft/machine/machine.h"
#include "weft/plan/job.h"
#include "weft/train/job.h"

namespace weft::train {

/// Of rank 0.
struct Prediction {
  std::optional<int64_t> peak_bytes;
  std::optional<double> step_s;
  std::string missing;  ///< why one of them is absent
};

/// The planner's description of a job of data-parallel ranks on `machine`.
plan::Job plan_job(const Job& job, int64_t ranks, const machine::Machine& machine);

/// Peak by a rehearsal of two micro-batches (further ones need no more), step time when there is a machine. Rank 0 only; about as
/// much time as two forward and backward passes without their arithmetic.
Prediction predict(const Job& job, int ranks, const std::optional<machine::Machine>& machine);

/// Seconds of a training step of a small decoder in `dtype` on this world, the median after a warm-up, and the job that it was. Collective.
struct Reference {
  Job job;
  double step_s = 0;
};
Reference measure_reference(const World& world, const std::string& dtype, double seconds);

/// "            predicted   measured", with relative differences; empty when there is nothing to compare.
std::string comparison(const Prediction& prediction, int64_t peak_bytes, double step_s);

}  // namespace weft::train
