// Closed-form estimates a second, and the whole space of a large job: the planner answers while one types.
#include <benchmark/benchmark.h>

#include "weft/model/presets.h"
#include "weft/plan/search.h"

namespace weft {
namespace {

plan::SearchRequest large_job() {
  plan::SearchRequest request;
  request.spec = model::preset("gpt3-175b");
  request.machine = machine::Machine::of("h100");
  request.sequence = 2048;
  request.devices = 1024;
  request.global_batch = 2048;
  return request;
}

/// One layout: memory of the fullest rank and step time. Target: 100,000 a second and core.
void closed_form(benchmark::State& state) {
  const plan::SearchRequest request = large_job();
  plan::Job job;
  job.model = plan::ModelSummary::of(request.spec, request.sequence);
  job.machine = request.machine;
  job.sequence = request.sequence;
  job.layout = {.pp = 8, .chunks = state.range(0), .dp = 16, .tp = 8, .sequence_parallel = true, .zero = 1, .micro_batch = 1, .global_batch = 2048};
  const cost::Tuning tuning;
  for (auto _ : state) {
    benchmark::DoNotOptimize(plan::peak_memory(job, tuning));
    benchmark::DoNotOptimize(plan::step_time(job, tuning));
  }
  state.counters["estimates/s"] = benchmark::Counter(1, benchmark::Counter::kIsIterationInvariantRate);
}

/// The whole space of a 1,024-device job of 175 billion parameters. Target: under a second.
void whole_space(benchmark::State& state) {
  const plan::SearchRequest request = large_job();
  int64_t layouts = 0;
  for (auto _ : state) layouts = plan::search(request, {}).considered;
  state.counters["layouts"] = static_cast<double>(layouts);
  state.counters["layouts/s"] = benchmark::Counter(static_cast<double>(layouts), benchmark::Counter::kIsIterationInvariantRate);
}

BENCHMARK(closed_form)->Arg(1)->Arg(6);
BENCHMARK(whole_space)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace weft

BENCHMARK_MAIN();
