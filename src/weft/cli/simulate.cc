// weft simulate: one step of a job, action by action, on the schedule that the runtime would execute.
#include <fmt/format.h>

#include <algorithm>
#include <iostream>
#include <memory>

#include "weft/cli/job_options.h"
#include "weft/cli/layout_options.h"
#include "weft/cli/planner_commands.h"
#include "weft/cli/terminal.h"
#include "weft/core/error.h"
#include "weft/core/json.h"
#include "weft/core/units.h"
#include "weft/plan/report.h"
#include "weft/plan/simulate.h"
#include "weft/schedule/draw.h"

namespace weft::cli {
namespace {

struct Options {
  JobOptions job;
  LayoutOptions layout;
  std::string colour = "auto", svg, trace;
  int width = 0;
};

/// Parts of a step that come after the pipeline; the closed form's.
double after_pipeline(const plan::Time& time) {
  return time.dp + time.optimizer + time.fixed;
}

Json to_json(const plan::Job& job, const plan::Simulation& simulation, const plan::Time& time) {
  Json json = {{"layout", plan::layout_json(job.layout)},
               {"pipeline_s", simulation.timeline.makespan},
               {"step_s", simulation.timeline.makespan + after_pipeline(time)},
               {"estimated_step_s", time.step},
               {"bubble", simulation.timeline.bubble()},
               {"busy_s", simulation.timeline.busy}};
  for (const plan::MemoryTrack& track : simulation.memory) json["peak_bytes"].push_back(track.peak);
  return json;
}

std::string to_text(const plan::Simulation& simulation, const plan::Time& time) {
  const double pipeline = simulation.timeline.makespan;
  std::string out = fmt::format(
      "pipeline   {}, {} idle per rank at most: bubble {:.1f} %\n", seconds_text(pipeline),
      seconds_text(pipeline - *std::min_element(simulation.timeline.busy.begin(), simulation.timeline.busy.end())),
      100 * simulation.timeline.bubble());
  out += fmt::format(
      "step       {} simulated, {} in closed form; {} of it after the pipeline (gradients, optimizer, fixed)\n",
      seconds_text(pipeline + after_pipeline(time)), seconds_text(time.step), seconds_text(after_pipeline(time)));
  out += "peak memory by rank\n";
  double most = 0;
  for (const plan::MemoryTrack& track : simulation.memory) most = std::max(most, track.peak);
  for (size_t rank = 0; rank < simulation.memory.size(); ++rank) {
    const plan::MemoryTrack& track = simulation.memory[rank];
    constexpr int bar_columns = 30;
    out += fmt::format("  rank {:>2}  {:>9}  {}  at {}\n", rank, bytes_text(track.peak),
                       plan::bar(track.peak / most, bar_columns), seconds_text(track.peak_time));
  }
  return out;
}

void run(const Options& options) {
  const bool colour = use_colour(options.colour);
  const int width = resolved_width(options.width);
  if (!options.job.program.empty()) throw ConfigError("--spec: a module of your own has no pipeline to simulate; use weft plan or weft estimate");
  const plan::Job job = job_of(options.job, options.layout);
  const cost::Tuning tuning = options.job.tuning();
  const schedule::Schedule schedule = plan::schedule_of(job);
  const plan::Simulation simulation =
      plan::simulate(schedule, plan::times_of(job, tuning), plan::bytes_of(job, tuning));
  const plan::Time time = plan::step_time(job, tuning);

  constexpr double microseconds = 1e6;
  if (!options.svg.empty()) write_text(options.svg, schedule::draw_svg(schedule, simulation.timeline));
  if (!options.trace.empty()) write_text(options.trace, plan::chrome_trace(schedule, simulation, microseconds).dump());
  if (options.job.json) {
    std::cout << to_json(job, simulation, time).dump(2) << "\n";
    return;
  }
  std::cout << fmt::format("{}, {} micro-batches\n\n", job.layout.text(), schedule.micro_batches)
            << schedule::draw(schedule, simulation.timeline, {.width = width, .colour = colour}) << "\n"
            << to_text(simulation, time);
}

}  // namespace

void add_simulate(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "simulate", "Simulate one step of a layout action by action: timeline, bubble, memory over time");
  auto options = std::make_shared<Options>();
  options->job.add_to(*command);
  options->layout.add_to(*command);
  command->add_option("--svg", options->svg, "write the drawing to this file");
  command->add_option("--trace", options->trace, "write a Chrome/Perfetto trace with memory counters to this file");
  command->add_option("--color", options->colour, "auto, always or never")->capture_default_str();
  command->add_option("--width", options->width, "columns of the drawing; 0: the terminal's");
  command->footer(
      "Example:\n  weft simulate --model llama3-8b --machine h100 --devices 16 --batch 64 --seq 8192 --tp 2 --pp 4 "
      "--trace step.json");
  command->callback([options, command] {
    options->job.read_config(*command);
    run(*options);
  });
}

}  // namespace weft::cli
