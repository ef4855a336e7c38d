// Event simulations a second: the planner's search simulates its best few hundred layouts.
#include <benchmark/benchmark.h>

#include "weft/plan/simulate.h"
#include "weft/schedule/generate.h"
#include "weft/schedule/passes.h"
#include "weft/schedule/validate.h"

namespace weft {
namespace {

void simulate(benchmark::State& state, const char* name) {
  const schedule::Generator& generator = schedule::find_generator(name);
  schedule::Schedule schedule =
      generator.make({static_cast<int>(state.range(0)), static_cast<int>(state.range(1)), generator.default_chunks});
  schedule::add_communication(schedule);
  const schedule::Times times = schedule::Times::uniform(schedule.stage_count(), 1, 1.1, 0.9, 0.05);
  const std::vector<plan::StageBytes> bytes(static_cast<size_t>(schedule.stage_count()),
                                            {.kept = 1, .kept_for_weight = 0.5});
  for (auto _ : state) benchmark::DoNotOptimize(plan::simulate(schedule, times, bytes));
  state.counters["simulations/s"] = benchmark::Counter(1, benchmark::Counter::kIsIterationInvariantRate);
}

void generate_and_validate(benchmark::State& state, const char* name) {
  const schedule::Generator& generator = schedule::find_generator(name);
  const schedule::Sizes sizes{static_cast<int>(state.range(0)), static_cast<int>(state.range(1)),
                              generator.default_chunks};
  for (auto _ : state) {
    schedule::Schedule schedule = generator.make(sizes);
    schedule::add_communication(schedule);
    if (schedule::validate(schedule)) state.SkipWithError("not valid");
  }
}

BENCHMARK_CAPTURE(simulate, 1f1b, "1f1b")->Args({8, 32});
BENCHMARK_CAPTURE(simulate, interleaved, "interleaved")->Args({8, 32});
BENCHMARK_CAPTURE(simulate, zb_v, "zb-v")->Args({8, 32});
BENCHMARK_CAPTURE(generate_and_validate, zb_v, "zb-v")->Args({8, 32});

}  // namespace
}  // namespace weft

BENCHMARK_MAIN();
