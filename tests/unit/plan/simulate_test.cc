#include "weft/plan/simulate.h"

#include <gtest/gtest.h>

#include "weft/model/presets.h"
#include "weft/schedule/count.h"
#include "weft/schedule/generate.h"
#include "weft/schedule/passes.h"

namespace weft::plan {
namespace {

// One byte per micro-batch in flight: the peak is the count that the schedule states.
TEST(Simulate, PeakMemoryIsTheInFlightCount) {
  for (const schedule::Generator& generator : schedule::generators()) {
    if (generator.name == "forward") continue;
    for (int p : {1, 2, 4}) {
      for (int m : {1, 3, 8, 12}) {
        SCOPED_TRACE(testing::Message() << generator.name << " p=" << p << " m=" << m);
        schedule::Schedule schedule = generator.make({p, m, generator.default_chunks});
        const schedule::InFlight counts = schedule::in_flight(schedule);
        schedule::add_communication(schedule);
        const schedule::Times times = schedule::Times::uniform(schedule.stage_count(), 1, 1.5, 0.5, 0.25);
        for (const bool until_weight : {false, true}) {
          const std::vector<StageBytes> bytes(
              static_cast<size_t>(schedule.stage_count()),
              {.kept = 1, .kept_for_weight = until_weight ? 1.0 : 0.0, .resident = 100});
          const Simulation simulation = simulate(schedule, times, bytes);
          for (int rank = 0; rank < p; ++rank) {
            const size_t r = static_cast<size_t>(rank);
            const double resident = 100 * schedule.stage_count() / p;
            EXPECT_EQ(simulation.memory[r].peak - resident,
                      (until_weight ? counts.to_weight_grad : counts.to_input_grad)[r]);
            EXPECT_EQ(simulation.memory[r].points.back().bytes, resident);  // everything is freed
          }
        }
      }
    }
  }
}

TEST(Simulate, GatheredParametersAndReduction) {
  schedule::Schedule schedule = schedule::one_f_one_b({2, 4, 1});
  schedule::add_communication(schedule);
  schedule::add_sharding(schedule);
  schedule::Times times = schedule::Times::uniform(2, 1, 1, 1);
  const double plain = simulate(schedule, times, {}).timeline.makespan;
  times.unshard = {2, 2};
  times.reduce = {3, 5};
  // Both ranks gather at time 0, behind which rank 0's first forward waits; rank 0 ends last and reduces its own stage.
  EXPECT_EQ(simulate(schedule, times, {}).timeline.makespan, plain + 2 + 3);
  const Simulation simulation = simulate(schedule, times, {{.kept = 1, .gathered = 50}, {.kept = 1, .gathered = 50}});
  EXPECT_EQ(simulation.memory[0].peak, 52);
  EXPECT_EQ(simulation.memory[0].points.back().bytes, 0);
}

Job job_of(const std::string& schedule, int64_t pp, int64_t chunks) {
  Job job;
  job.sequence = 4096;
  job.layout.pp = pp;
  job.layout.chunks = chunks;
  job.layout.tp = 4;
  job.layout.sequence_parallel = true;
  job.layout.zero = 1;
  job.layout.global_batch = 32;
  job.layout.schedule = schedule;
  job.model = ModelSummary::of(model::preset("llama3-8b"), job.sequence);
  job.machine = machine::Machine::of("h100");
  return job;
}

// The closed form and the simulation of one job: same memory, and step times that agree where the closed form holds.
TEST(Simulate, AgreesWithTheEstimateOfAJob) {
  const cost::Tuning tuning;
  for (const auto& [name, chunks] : {std::pair{"gpipe", 1}, {"1f1b", 1}, {"1f1b", 2}}) {
    SCOPED_TRACE(testing::Message() << name << " chunks " << chunks);
    const Job job = job_of(name, 4, chunks);
    const Simulation simulation = simulate(schedule_of(job), times_of(job, tuning), bytes_of(job, tuning));
    const Time time = step_time(job, tuning);
    const double pipeline = time.step - time.optimizer - time.dp - time.fixed;
    EXPECT_NEAR(simulation.timeline.makespan / pipeline, 1, 0.1);
    const std::vector<Memory> memory = stage_memory(job, tuning);
    for (size_t rank = 0; rank < memory.size(); ++rank)
      EXPECT_NEAR(simulation.memory[rank].peak / memory[rank].allocated(), 1, 0.02);
  }
}

// The steady state is simulated over some periods only; the rest is as many of the last period.
TEST(Simulate, LongSchedulesAreExtrapolated) {
  const cost::Tuning tuning;
  for (const auto& [name, chunks] : {std::pair{"1f1b", 1}, {"1f1b", 2}, {"zb-h1", 1}, {"zb-v", 2}}) {
    for (const int64_t batch : {128, 134}) {
      if (batch % 4 != 0 && chunks == 2 && std::string(name) == "1f1b") continue;  // interleaving wants whole groups
      SCOPED_TRACE(testing::Message() << name << " chunks " << chunks << " batch " << batch);
      Job job = job_of(name, 4, chunks);
      job.layout.global_batch = batch;
      job.machine.device.multiprocessors = 1 << 30;  // transfers take none that count
      const Time time = simulated_time(job, tuning);
      const double whole = simulate(schedule_of(job), times_of(job, tuning), {}).timeline.makespan;
      EXPECT_NEAR((time.step - time.dp - time.optimizer - time.fixed) / whole, 1, 1e-3);
    }
  }
}

}  // namespace
}  // namespace weft::plan
