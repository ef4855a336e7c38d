// weft schedule: draws a pipeline schedule, counts its bubble, exports it.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>

#include "weft/cli/planner_commands.h"
#include "weft/cli/terminal.h"
#include "weft/core/error.h"
#include "weft/core/json.h"
#include "weft/plan/simulate.h"
#include "weft/schedule/count.h"
#include "weft/schedule/draw.h"
#include "weft/schedule/generate.h"
#include "weft/schedule/passes.h"
#include "weft/schedule/text.h"
#include "weft/schedule/validate.h"

namespace weft::cli {
namespace {

struct Options {
  std::string name;
  schedule::Sizes sizes{.ranks = 4, .micro_batches = 8};
  std::optional<int> chunks;
  std::vector<std::string> times;
  std::string colour = "auto", svg, trace;
  int width = 0;
  bool communication = false, sharding = false;
  bool text = false, csv = false, json = false;
};

/// Durations by name, in any unit. `pair`: see schedule::Times.
struct TimeOptions {
  double forward = 1, input_grad = 1, weight_grad = 1, send = 0, pair = 0;
};

TimeOptions parse_times(const std::vector<std::string>& items) {
  TimeOptions times;
  const std::vector<std::pair<std::string, double*>> known = {{"F", &times.forward},
                                                              {"I", &times.input_grad},
                                                              {"W", &times.weight_grad},
                                                              {"send", &times.send},
                                                              {"pair", &times.pair}};
  Findings findings;
  for (const std::string& item : items) {
    const size_t equals = item.find('=');
    const std::string key = item.substr(0, equals);
    const auto it = std::find_if(known.begin(), known.end(), [&](const auto& entry) { return entry.first == key; });
    if (equals == item.npos || it == known.end()) {
      findings.add("--time", fmt::format("\"{}\" is not one of F=, I=, W=, send=, pair=", item),
                   "for instance --time F=1,I=1,W=1,send=0.1");
      continue;
    }
    const char* end = item.data() + item.size();
    const auto [rest, error] = std::from_chars(item.data() + equals + 1, end, *it->second);
    const bool may_be_zero = key == "send" || key == "pair";
    constexpr double largest = 1e9;  // beyond it the picture's arithmetic loses its digits
    if (error != std::errc() || rest != end || !(may_be_zero ? *it->second >= 0 : *it->second > 0) ||
        !(*it->second <= largest)) {
      findings.add("--time", fmt::format("\"{}\" is not a duration", item),
                   may_be_zero ? "a number from 0 to 1e9" : "a number above 0, at most 1e9");
    }
  }
  findings.throw_if_any("weft schedule");
  return times;
}

/// Whether the name means a file in one of the two text forms; generators have neither dots nor slashes.
bool is_file(const std::string& name) {
  return name.find_first_of("./") != std::string::npos;
}

schedule::Schedule load(Options& options) {
  if (is_file(options.name)) {
    const std::string content = read_text(options.name);
    const std::string stem = std::filesystem::path(options.name).filename().string();
    schedule::Schedule schedule =
        options.name.ends_with(".csv") ? schedule::from_csv(content, stem) : schedule::from_text(content, stem);
    schedule::require_valid(schedule);
    return schedule;
  }
  const schedule::Generator& generator = schedule::find_generator(options.name);
  options.sizes.chunks = options.chunks.value_or(generator.default_chunks);
  schedule::check(generator, options.sizes, "--").throw_if_any("weft schedule " + options.name);
  return generator.make(options.sizes);
}

Json to_json(const schedule::Schedule& schedule, const schedule::Timeline& timeline,
             const std::optional<schedule::ClosedForm>& form) {
  const schedule::InFlight counts = schedule::in_flight(schedule);
  Json json = {
      {"schedule", schedule.name},
      {"ranks", schedule.rank_count()},
      {"microbatches", schedule.micro_batches},
      {"stages", schedule.stage_count()},
      {"owner", schedule.owner},
      {"makespan", timeline.makespan},
      {"busy", timeline.busy},
      {"bubble", timeline.bubble()},
      {"formula", form ? Json{{"bubble", form->fraction}, {"idle", form->idle}, {"text", form->text}} : Json(nullptr)},
      {"in_flight", {{"to_input_gradient", counts.to_input_grad}, {"to_weight_gradient", counts.to_weight_grad}}}};
  const bool with_stage = !schedule.one_stage_per_rank();
  for (const auto& list : schedule.ranks) {
    Json names = Json::array();
    for (const schedule::Action& action : list) names.push_back(schedule::to_text(action, with_stage));
    json["actions"].push_back(std::move(names));
  }
  return json;
}

std::string facts(const schedule::Schedule& schedule, const schedule::Timeline& timeline,
                  const std::optional<schedule::ClosedForm>& form, double send) {
  const schedule::InFlight counts = schedule::in_flight(schedule);
  std::string out = fmt::format("time       {:g}, work {:g} per rank\n", timeline.makespan, timeline.busy.front());
  out += fmt::format("bubble     {:.1f} %", 100 * timeline.bubble());
  if (form)
    out += fmt::format("; formula {:.1f} %: idle {} = {:g}{}", 100 * form->fraction, form->text, form->idle,
                       send > 0 ? ", with free transfers" : "");
  else
    out += "; no closed form for these sizes and times";
  out += fmt::format("\nin flight  {} micro-batches{} by rank", fmt::join(counts.to_input_grad, " "),
                     schedule.one_stage_per_rank() ? "" : " x stages");
  if (counts.to_weight_grad != counts.to_input_grad)
    out += fmt::format("; until their weight gradient {}", fmt::join(counts.to_weight_grad, " "));
  return out + "\n";
}

void run(Options options) {
  if (options.text + options.csv + options.json > 1)
    throw ConfigError("--text, --csv and --json exclude each other: each owns the output");
  const TimeOptions t = parse_times(options.times);
  const bool colour = use_colour(options.colour);
  const int width = resolved_width(options.width);
  schedule::Schedule schedule = load(options);
  if (options.communication) schedule::add_communication(schedule);
  if (options.sharding) schedule::add_sharding(schedule);

  schedule::Times times =
      schedule::Times::uniform(schedule.stage_count(), t.forward, t.input_grad, t.weight_grad, t.send);
  times.pair = t.pair;
  const plan::Simulation simulation = plan::simulate(schedule, times, {});
  const schedule::Timeline& timeline = simulation.timeline;
  std::optional<schedule::ClosedForm> form;
  if (t.pair == 0 && !is_file(options.name))
    form = schedule::closed_form(schedule.name, options.sizes, {t.forward, t.input_grad, t.weight_grad});

  constexpr double unit_in_trace = 1000;  // one unit of time shows as a millisecond
  if (!options.svg.empty()) write_text(options.svg, schedule::draw_svg(schedule, timeline));
  if (!options.trace.empty()) write_text(options.trace, plan::chrome_trace(schedule, simulation, unit_in_trace).dump());
  if (options.text) {
    std::cout << schedule::to_text(schedule);
  } else if (options.csv) {
    std::cout << schedule::to_csv(schedule);
  } else if (options.json) {
    std::cout << to_json(schedule, timeline, form).dump(2) << "\n";
  } else {
    std::cout << fmt::format("{}: {} ranks, {} micro-batches, {} stages\n\n", schedule.name, schedule.rank_count(),
                             schedule.micro_batches, schedule.stage_count())
              << schedule::draw(schedule, timeline, {.width = width, .colour = colour}) << "\n"
              << facts(schedule, timeline, form, t.send);
  }
}

}  // namespace

void add_schedule(CLI::App& app) {
  CLI::App* command = app.add_subcommand("schedule", "Draw a pipeline schedule, count its bubble, export it");
  auto options = std::make_shared<Options>();
  std::string names;
  for (const schedule::Generator& generator : schedule::generators())
    names += fmt::format("\n  {:<12} {}", generator.name, generator.what);
  command
      ->add_option("name", options->name,
                   "a schedule below, or a file of actions (.csv: PyTorch's layout; else lines \"rank 0: F0 B0\")")
      ->required();
  command->add_option("--ranks", options->sizes.ranks, "pipeline ranks")->capture_default_str();
  command->add_option("--microbatches", options->sizes.micro_batches, "micro-batches of one step")
      ->capture_default_str();
  command->add_option("--chunks", options->chunks,
                      "stages per rank (default: 2 where the schedule needs them, else 1)");
  command
      ->add_option("--time", options->times,
                   "durations F=1,I=1,W=1,send=0; pair=1 runs an overlapped pair in 1 x (F + B)")
      ->delimiter(',');
  command->add_flag("--communication", options->communication, "add SEND and RECV");
  command->add_flag("--sharding", options->sharding, "add UNSHARD, RESHARD and REDUCE");
  command->add_flag("--text", options->text, "print the action lists, one line per rank");
  command->add_flag("--csv", options->csv, "print the action lists in PyTorch's layout");
  command->add_flag("--json", options->json, "print everything for machines");
  command->add_option("--svg", options->svg, "write the drawing to this file");
  command->add_option("--trace", options->trace, "write a Chrome/Perfetto trace to this file");
  command->add_option("--color", options->colour, "auto, always or never")->capture_default_str();
  command->add_option("--width", options->width, "columns of the drawing; 0: the terminal's");
  command->footer("Schedules:" + names + "\n\nExample:\n  weft schedule 1f1b --ranks 4 --microbatches 8");
  command->callback([options] { run(*options); });
}

}  // namespace weft::cli
