// weft plan: ranked layouts of a job, why others lost, and what would help.
#include <fmt/format.h>

#include <iostream>
#include <memory>

#include "weft/cli/job_options.h"
#include "weft/cli/planner_commands.h"
#include "weft/config/fields.h"
#include "weft/core/error.h"
#include "weft/core/json.h"
#include "weft/plan/export.h"
#include "weft/plan/report.h"

namespace weft::cli {
namespace {

struct Options {
  JobOptions job;
  std::string objective = "speed", export_to, out;
  std::vector<int64_t> tp, pp, cp, ep, micro_batch;
  std::vector<int> zero;
  std::vector<std::string> schedules;
  bool no_offload = false;
  size_t top = 10;
};

plan::Objective parse_objective(const std::string& name) {
  // The number of devices is given, and so are the rates of price and failures: what is fastest costs least and loses least.
  if (name == "speed" || name == "cost" || name == "goodput") return plan::Objective::speed;
  if (name == "memory") return plan::Objective::memory;
  if (name == "safe") return plan::Objective::balanced;
  throw ConfigError("--objective " + name + ": use speed, cost or goodput (both the same order as speed, because devices are given), memory, or safe (speed among layouts that fit with 99% probability)");
}

plan::SearchRequest request_of(const Options& options) {
  plan::SearchRequest request;
  request.spec = options.job.spec();
  request.machine = options.job.resolved_machine();
  request.software = options.job.software();
  request.precision = machine::parse_precision(options.job.precision);
  request.sequence = options.job.resolved_sequence(request.spec);
  request.devices = options.job.devices;
  request.global_batch = options.job.batch;
  request.objective = parse_objective(options.objective);
  request.tp = options.tp, request.pp = options.pp, request.cp = options.cp, request.ep = options.ep;
  request.micro_batch = options.micro_batch, request.zero = options.zero;
  if (!options.schedules.empty()) request.schedules = options.schedules;
  else if (options.export_to == "megatron") request.schedules = {"1f1b"};  // the only one that it has
  request.offload = !options.no_offload;
  return request;
}

/// Device-hours of a billion tokens.
double hours_per_billion(const plan::SearchRequest& request, const plan::Candidate& candidate) {
  return static_cast<double>(request.devices) / 3600 / candidate.tokens_per_second * 1e9;
}

/// Of the best layout; nothing without rates.
std::string cost_text(const plan::SearchRequest& request, const plan::SearchResult& result, const plan::Rates& rates) {
  if (result.ranked.empty() || (rates.price <= 0 && rates.watts <= 0)) return "";
  const double hours = hours_per_billion(request, result.ranked.front());
  std::string out = "\nA billion tokens with the best layout:";
  if (rates.price > 0) out += fmt::format(" {:.0f} at {:.2f} per device-hour", rates.price * hours, rates.price);
  if (rates.watts > 0) out += fmt::format("{} {:.0f} kWh", rates.price > 0 ? "," : "", rates.watts / 1000 * hours);
  return out + "\n";
}

void run(const Options& options) {
  const cost::Tuning tuning = options.job.tuning();
  const plan::SearchRequest request = request_of(options);
  const plan::SearchResult result = plan::search(request, tuning);
  const std::vector<std::string> words = plan::explain(request, result, tuning);
  if ((!options.export_to.empty() || !options.out.empty()) && result.ranked.empty()) throw ConfigError("nothing fits, so there is no plan to write:\n  " + words.back());
  const auto known = [](const std::string& key) { return config::find_field(key) != nullptr; };
  if (!options.out.empty()) write_text(options.out, plan::plan_toml(request, result.ranked.front(), known));
  if (!options.export_to.empty()) {
    std::cout << plan::export_flags(options.export_to, request, result.ranked.front());
    return;
  }
  const std::vector<plan::Sensitivity> sensitivities = plan::sensitivity(request, result, tuning);
  const plan::Rates& rates = options.job.rates;
  if (!options.job.json) {
    std::cout << plan::search_text(request, result, words, sensitivities, options.top) << cost_text(request, result, rates);
    return;
  }
  Json json = plan::search_json(request, result, words, sensitivities, options.top);
  if (rates.price > 0 && !result.ranked.empty()) json["price_per_billion_tokens"] = rates.price * hours_per_billion(request, result.ranked.front());
  if (rates.watts > 0 && !result.ranked.empty()) json["kwh_per_billion_tokens"] = rates.watts / 1000 * hours_per_billion(request, result.ranked.front());
  std::cout << json.dump(2) << "\n";
}

/// A module of the user's own.
void run_program(const Options& options) {
  if (!options.export_to.empty() || !options.out.empty()) throw ConfigError("--spec: a module of your own has no plan file: take zero and micro-batch into your program (DataParallelOptions::sharding)");
  const plan::ProgramPlan plan = plan::search(options.job.program_job(), options.job.tuning());
  std::cout << (options.job.json ? plan::program_plan_json(plan, options.top).dump(2) + "\n" : plan::program_plan_text(plan, options.top));
}

}  // namespace

void add_plan(CLI::App& app) {
  CLI::App* command = app.add_subcommand("plan", "Rank all layouts of a job: what fits, how fast, and why");
  auto options = std::make_shared<Options>();
  options->job.add_to(*command);
  command->add_option("--objective", options->objective, "speed, memory or safe (fits with 99% probability); cost and goodput, which at a given number of devices order layouts as speed does")->capture_default_str();
  command->add_option("--tp", options->tp, "only these tensor-parallel degrees")->delimiter(',');
  command->add_option("--pp", options->pp, "only these numbers of stages")->delimiter(',');
  command->add_option("--cp", options->cp, "only these context-parallel degrees")->delimiter(',');
  command->add_option("--ep", options->ep, "only these expert-parallel degrees")->delimiter(',');
  command->add_option("--zero", options->zero, "only these ZeRO stages (else 0, 1 and 3)")->delimiter(',');
  command->add_option("--micro-batch", options->micro_batch, "only these micro-batches")->delimiter(',');
  command->add_option("--schedule", options->schedules, "only these pipeline schedules: 1f1b (interleaved over chunks), zb-h1, zb-v")->delimiter(',');
  command->add_flag("--no-offload", options->no_offload, "keep the optimizer on the device, whatever does not fit");
  command->add_option("--top", options->top, "layouts to show")->capture_default_str();
  command->add_option("--out", options->out, "write the best plan to this TOML file");
  command->add_option("--export", options->export_to, "print the best layout as flags of megatron or torchtitan");
  command->footer("Example:\n  weft plan --model llama3-70b --machine h100 --devices 64 --batch 1024 --seq 8192");
  command->callback([options, command] {
    options->job.read_config(*command);
    if (!options->job.program.empty()) run_program(*options);
    else run(*options);
  });
}

}  // namespace weft::cli
