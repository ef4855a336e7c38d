#include "weft/cli/planner_commands.h"

#include <fmt/format.h>

#include <fstream>
#include <iostream>
#include <memory>

#include "weft/core/error.h"
#include "weft/plan/runs.h"

namespace weft::cli {
namespace {

struct Options {
  std::string runs, out, row;
  std::vector<std::string> constants;
};

cost::Tuning tuning_of(const std::vector<std::string>& settings) {
  cost::Tuning tuning;
  for (const std::string& setting : settings) {
    const size_t equals = setting.find('=');
    if (equals == std::string::npos) throw ConfigError("--constant " + setting + ": the form is NAME=VALUE");
    cost::set_constant(tuning, setting.substr(0, equals), std::stod(setting.substr(equals + 1)));
  }
  return tuning;
}

void show(const plan::RunRow& row, const cost::Tuning& tuning) {
  std::vector<std::string> as;
  const plan::Job job = plan::job_of_run(row, as);
  const plan::Estimate e = plan::estimate(job, tuning);
  const plan::Time& t = e.time;
  fmt::print("{} {} m={} params {:.4g}\n", row.text("id"), job.layout.text(), job.layout.micro_batches(), job.model.total_parameters);
  for (auto [n, v] : std::initializer_list<std::pair<const char*, double>>{{"gemm", t.gemm}, {"attention", t.attention}, {"memory", t.memory}, {"host", t.host}, {"recompute", t.recompute}, {"tp", t.tp}, {"cp", t.cp}, {"ep", t.ep}, {"pp", t.pp}, {"dp", t.dp}, {"bubble", t.bubble}, {"optimizer", t.optimizer}, {"fixed", t.fixed}, {"step", t.step}})
    fmt::print("  {:10} {:9.4f}  {:5.1f}%\n", n, v, 100 * v / t.step);
  for (const plan::Memory& m : plan::stage_memory(job, tuning))
    fmt::print("  stage {} w {:.2f} g {:.2f} o {:.2f} act {:.2f} logits {:.2f} transient {:.2f} alloc {:.2f} reserved {:.2f} device {:.2f}\n", m.stage, m.weights / 1073741824., m.gradients / 1073741824., m.optimizer / 1073741824., m.activations / 1073741824., m.logits / 1073741824., m.transient / 1073741824., m.allocated() / 1073741824., m.reserved() / 1073741824., m.device() / 1073741824.);
  fmt::print("  measured time {} tok/s {} mem {}\n", row.text("step_time_s"), row.text("tokens_per_s_per_gpu"), row.text("peak_mem_gb"));
}

void run(const Options& options) {
  const cost::Tuning tuning = tuning_of(options.constants);
  if (!options.row.empty()) {
    for (const plan::RunRow& row : plan::read_runs(options.runs))
      if (row.text("id") == options.row) show(row, tuning);
    return;
  }
  std::vector<plan::RunPrediction> predictions;
  for (const plan::RunRow& row : plan::read_runs(options.runs)) predictions.push_back(plan::predict_run(row, tuning));
  std::ofstream out(options.out);
  plan::write_predictions(out, predictions);
}

}  // namespace

void add_estimate(CLI::App& app) {
  CLI::App* command = app.add_subcommand("estimate", "Memory and step time of one layout, or of a table of runs");
  auto options = std::make_shared<Options>();
  command->add_option("--runs", options->runs, "CSV file of runs");
  command->add_option("--out", options->out, "predictions");
  command->add_option("--row", options->row, "show one row");
  command->add_option("--constant", options->constants, "NAME=VALUE");
  command->callback([options] { run(*options); });
}

}  // namespace weft::cli
