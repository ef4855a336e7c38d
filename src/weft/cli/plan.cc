// weft plan: ranked layouts of a job, why others lost, and what would help.
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
  if (name == "speed") return plan::Objective::speed;
  if (name == "memory") return plan::Objective::memory;
  if (name == "safe") return plan::Objective::balanced;
  throw ConfigError("--objective " + name + ": use speed, memory or safe (speed among layouts that fit with 99% probability)");
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
  if (options.job.json) std::cout << plan::search_json(request, result, words, sensitivities, options.top).dump(2) << "\n";
  else std::cout << plan::search_text(request, result, words, sensitivities, options.top);
}

}  // namespace

void add_plan(CLI::App& app) {
  CLI::App* command = app.add_subcommand("plan", "Rank all layouts of a job: what fits, how fast, and why");
  auto options = std::make_shared<Options>();
  options->job.add_to(*command);
  command->add_option("--objective", options->objective, "speed, memory or safe")->capture_default_str();
  command->add_option("--tp", options->tp, "only these tensor-parallel degrees")->delimiter(',');
  command->add_option("--pp", options->pp, "only these numbers of stages")->delimiter(',');
  command->add_option("--cp", options->cp, "only these context-parallel degrees")->delimiter(',');
  command->add_option("--ep", options->ep, "only these expert-parallel degrees")->delimiter(',');
  command->add_option("--zero", options->zero, "only these ZeRO stages")->delimiter(',');
  command->add_option("--micro-batch", options->micro_batch, "only these micro-batches")->delimiter(',');
  command->add_option("--schedule", options->schedules, "only these pipeline schedules: 1f1b (interleaved over chunks), zb-h1, zb-v")->delimiter(',');
  command->add_flag("--no-offload", options->no_offload, "keep the optimizer on the device, whatever does not fit");
  command->add_option("--top", options->top, "layouts to show")->capture_default_str();
  command->add_option("--out", options->out, "write the best plan to this TOML file");
  command->add_option("--export", options->export_to, "print the best layout as flags of megatron or torchtitan");
  command->footer("Example:\n  weft plan --model llama3-70b --machine h100 --devices 64 --batch 1024 --seq 8192");
  command->callback([options, command] {
    options->job.read_config(*command);
    run(*options);
  });
}

}  // namespace weft::cli
