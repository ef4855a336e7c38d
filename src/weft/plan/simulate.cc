#include "weft/plan/simulate.h"

#include <fmt/format.h>

#include <algorithm>

#include "weft/cost/memory.h"
#include "weft/schedule/generate.h"
#include "weft/schedule/passes.h"
#include "weft/schedule/text.h"

namespace weft::plan {
namespace {

using schedule::Kind;

/// Bytes by which a span changes its rank's memory, at its start and at its end.
std::pair<double, double> changes(const schedule::Span& span, const StageBytes& bytes) {
  switch (span.action.kind) {
    case Kind::forward:
      return {bytes.kept, 0};
    case Kind::input_grad:
      return {0, bytes.kept_for_weight - bytes.kept};
    case Kind::weight_grad:
      return {0, -bytes.kept_for_weight};
    case Kind::backward:
      return {0, -bytes.kept};
    case Kind::unshard:
      return {bytes.gathered, 0};
    case Kind::reshard:
      return {0, -bytes.gathered};
    default:
      return {0, 0};
  }
}

std::vector<MemoryTrack> track_memory(const schedule::Schedule& schedule, const schedule::Timeline& timeline,
                                      const std::vector<StageBytes>& bytes) {
  std::vector<MemoryTrack> tracks(schedule.ranks.size());
  std::vector<double> resident(schedule.ranks.size(), 0);
  for (size_t stage = 0; stage < bytes.size(); ++stage)
    resident[static_cast<size_t>(schedule.owner[stage])] += bytes[stage].resident;
  for (const schedule::Span& span : timeline.spans) {
    const auto [start, end] = changes(span, bytes[static_cast<size_t>(span.action.stage)]);
    std::vector<MemoryTrack::Point>& points = tracks[static_cast<size_t>(span.rank)].points;
    if (start != 0) points.push_back({span.start, start});
    if (end != 0) points.push_back({span.end, end});
  }
  for (size_t rank = 0; rank < tracks.size(); ++rank) {
    MemoryTrack& track = tracks[rank];
    // Stable: at one moment what ends is freed before what follows it in the list allocates.
    std::stable_sort(track.points.begin(), track.points.end(),
                     [](const auto& a, const auto& b) { return a.time < b.time; });
    track.points.insert(track.points.begin(), {0, 0});
    double now = track.peak = resident[rank];
    for (MemoryTrack::Point& point : track.points) {
      point.bytes = now += point.bytes;
      if (now > track.peak) track.peak = now, track.peak_time = point.time;
    }
  }
  return tracks;
}

}  // namespace

Simulation simulate(const schedule::Schedule& schedule, const schedule::Times& times,
                    const std::vector<StageBytes>& bytes) {
  Simulation simulation{schedule::run(schedule, times), {}};
  if (!bytes.empty()) simulation.memory = track_memory(schedule, simulation.timeline, bytes);
  return simulation;
}

schedule::Schedule schedule_of(const Job& job) {
  const layout::Layout& layout = job.layout;
  const std::string name = layout.schedule == "1f1b" && layout.chunks > 1 ? "interleaved" : layout.schedule;
  schedule::Schedule schedule = schedule::generate(
      name, {static_cast<int>(layout.pp), static_cast<int>(std::max<int64_t>(1, layout.micro_batches())),
             static_cast<int>(layout.chunks)});
  schedule::add_communication(schedule);
  return schedule;
}

schedule::Times times_of(const Job& job, const cost::Tuning& tuning) {
  schedule::Times times;
  for (const StageTimes& stage : stage_times(job, tuning)) {
    times.forward.push_back(stage.forward);
    times.input_grad.push_back(stage.input);
    times.weight_grad.push_back(stage.weight);
    times.send = std::max(times.send, stage.send);
  }
  return times;
}

namespace {

/// Micro-batches of a period of the steady state: a group of interleaved chunks.
int64_t period_of(const layout::Layout& layout) { return layout.pp; }

/// Micro-batches after which a schedule only repeats: fill and drain, in periods.
int64_t simulated_micro_batches(const layout::Layout& layout) {
  constexpr int64_t kPeriods = 4;
  const int64_t all = std::max<int64_t>(1, layout.micro_batches()), period = period_of(layout);
  if (all <= (kPeriods + 1) * period) return all;
  return kPeriods * period + all % period;
}

}  // namespace

double simulated_actions(const layout::Layout& layout) {
  // F, I or B, W, and sends and receives of both directions.
  constexpr double kPerMicroBatch = 6;
  return kPerMicroBatch * static_cast<double>(layout.pp * layout.chunks * simulated_micro_batches(layout));
}

Time simulated_time(const Job& job, const cost::Tuning& tuning) {
  const layout::Layout& layout = job.layout;
  Time time = step_time(job, tuning);
  schedule::Times times = times_of(job, tuning);
  // Transfers take multiprocessors from the chunk that runs; those that block take its time.
  const double lost = times.send * (job.software.overlap_pp ? cost::slowdown_of(cost::kSendChannels, job.machine) : 1);
  for (double& forward : times.forward) forward += lost;
  for (double& input : times.input_grad) input += lost;
  const auto makespan = [&](int64_t micro_batches) {
    Job part = job;
    part.layout.global_batch = micro_batches * layout.dp * layout.micro_batch;
    return schedule::run(schedule_of(part), times).makespan;
  };
  const int64_t all = std::max<int64_t>(1, layout.micro_batches()), some = simulated_micro_batches(layout), period = period_of(layout);
  double pipeline = makespan(some);
  if (some < all) pipeline += (pipeline - makespan(some - period)) * static_cast<double>((all - some) / period);
  const double change = pipeline - (time.step - time.dp - time.optimizer - time.fixed);
  const double wait = change * straggler_share(layout, tuning);
  // What is left idle is bubble; where transfers hide better than assumed, they cost less.
  time.pp += std::min(0.0, time.bubble + change);
  time.bubble = std::max(0.0, time.bubble + change);
  time.fixed += wait;
  time.step += change + wait;
  time.step_p95 = kP95OverMedian * time.step;
  return time;
}

std::vector<StageBytes> bytes_of(const Job& job, const cost::Tuning& tuning) {
  const layout::Layout& layout = job.layout;
  const std::vector<Memory> ranks = stage_memory(job, tuning);
  const int64_t micro_batches = std::max<int64_t>(1, layout.micro_batches());
  std::vector<StageBytes> stages;
  for (int64_t stage = 0; stage < layout.pp * layout.chunks; ++stage) {
    const int64_t rank = stage % layout.pp;
    const Memory& memory = ranks[static_cast<size_t>(rank)];
    const double chunks = static_cast<double>(layout.chunks);
    const double whole =
        memory.activations / cost::in_flight(layout.schedule, layout.pp, layout.chunks, micro_batches, rank);
    StageBytes bytes;
    bytes.kept = whole / chunks;
    // The inputs of the matrices are most of what is kept; counting all of it is the safe side.
    bytes.kept_for_weight = bytes.kept;
    bytes.resident = (memory.allocated() - memory.activations) / chunks;
    stages.push_back(bytes);
  }
  return stages;
}

Json chrome_trace(const schedule::Schedule& schedule, const Simulation& simulation, double microseconds) {
  static constexpr const char* streams[] = {"compute", "transfer", "collective"};
  Json events = Json::array();
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    events.push_back(
        {{"ph", "M"}, {"name", "process_name"}, {"pid", rank}, {"args", {{"name", fmt::format("rank {}", rank)}}}});
    for (int stream = 0; stream < 3; ++stream) {
      events.push_back({{"ph", "M"},
                        {"name", "thread_name"},
                        {"pid", rank},
                        {"tid", stream},
                        {"args", {{"name", streams[stream]}}}});
    }
  }
  for (const schedule::Span& span : simulation.timeline.spans) {
    const bool posted = span.action.kind == Kind::recv_activation || span.action.kind == Kind::recv_grad;
    if (posted) continue;  // the sender's transfer is the same event
    events.push_back(
        {{"ph", "X"},
         {"name", schedule::to_text(span.action, true)},
         {"cat", schedule::kind_name(span.action.kind)},
         {"pid", span.rank},
         {"tid", static_cast<int>(span.stream)},
         {"ts", span.start * microseconds},
         {"dur", (span.end - span.start) * microseconds},
         {"args", {{"step", span.step}, {"micro_batch", span.action.micro_batch}, {"stage", span.action.stage}}}});
  }
  for (size_t rank = 0; rank < simulation.memory.size(); ++rank) {
    for (const MemoryTrack::Point& point : simulation.memory[rank].points) {
      events.push_back({{"ph", "C"},
                        {"name", "memory"},
                        {"pid", rank},
                        {"ts", point.time * microseconds},
                        {"args", {{"bytes", point.bytes}}}});
    }
  }
  return {{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}};
}

}  // namespace weft::plan
