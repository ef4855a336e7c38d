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
  std::string runs, out;
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

void run(const Options& options) {
  const cost::Tuning tuning = tuning_of(options.constants);
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
  command->add_option("--constant", options->constants, "NAME=VALUE");
  command->callback([options] { run(*options); });
}

}  // namespace weft::cli
