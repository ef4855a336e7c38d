// Fits the constants of the cost model to the step times of a table of runs, and predicts every source blind: with constants
// that were fitted to all the others. scripts/accuracy.py prints its answer.
//   fit_constants RUNS.csv [--json FILE]
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "weft/core/error.h"
#include "weft/core/json.h"
#include "weft/cost/tuning.h"
#include "weft/plan/estimate.h"
#include "weft/plan/runs.h"

namespace weft {
namespace {

/// Weight of the constants' distance from their start values against the errors of the runs.
constexpr double kPriorWeight = 0.01;
constexpr double kLargestError = 0.6;  // of one run, as a logarithm: a run that is not understood moves nothing
constexpr int kRounds = 5;
constexpr size_t kLeast = 5;  // runs of a source that is left out

struct Run {
  std::string source;
  plan::Job job;
  double measured = 0;
  bool fitted = false;  ///< pre-training: other kinds are predicted only
};

double measured_of(const plan::RunRow& row) {
  if (!row.text("step_time_s").empty()) return row.number("step_time_s");
  for (const char* column : {"tokens_per_s_per_gpu", "global_batch_seqs", "seq_len", "gpus"})
    if (row.text(column).empty()) return 0;
  return row.number("global_batch_seqs") * row.number("seq_len") / (row.number("tokens_per_s_per_gpu") * row.number("gpus"));
}

std::vector<Run> read(const std::string& path) {
  std::vector<Run> runs;
  for (const plan::RunRow& row : plan::read_runs(path)) {
    Run run;
    run.measured = measured_of(row);
    if (!(run.measured > 0)) continue;
    try {
      std::vector<std::string> assumptions;
      run.job = plan::job_of_run(row, assumptions);
    } catch (const ConfigError&) {
      continue;  // lacks an input
    }
    run.source = row.text("id").substr(0, row.text("id").rfind('-'));
    run.fitted = row.text("kind").empty() || row.text("kind") == "pretrain";
    runs.push_back(std::move(run));
  }
  return runs;
}

using Errors = std::map<std::string, std::vector<double>>;

/// Relative errors by source.
Errors errors_of(const std::vector<Run>& runs, const cost::Tuning& tuning, bool fitted_only) {
  Errors errors;
  for (const Run& run : runs)
    if (run.fitted || !fitted_only) errors[run.source].push_back(plan::step_time(run.job, tuning).step / run.measured - 1);
  return errors;
}

/// Mean absolute logarithm of the errors, sources weighed by the root of their size, plus the price of the constants.
double loss(const std::vector<Run>& runs, const cost::Tuning& tuning, const std::string& left_out) {
  double total = 0, weight = 0, prior = 0;
  for (const auto& [source, errors] : errors_of(runs, tuning, true)) {
    if (source == left_out) continue;
    double sum = 0;
    for (double error : errors) sum += std::min(std::fabs(std::log(1 + error)), kLargestError);
    const double count = static_cast<double>(errors.size());
    total += std::sqrt(count) * sum / count;
    weight += std::sqrt(count);
  }
  int fitted = 0;
  for (const cost::TunedConstant& constant : cost::tuned_constants()) {
    if (constant.spread == 0) continue;
    prior += std::pow(std::log(tuning.*constant.value / constant.start) / constant.spread, 2);
    ++fitted;
  }
  return total / weight + kPriorWeight * prior / fitted;
}

/// Coordinate descent from the start values, with steps that grow where they help.
cost::Tuning fit(const std::vector<Run>& runs, const std::string& left_out) {
  cost::Tuning tuning;
  std::map<std::string, double> steps;
  for (const cost::TunedConstant& constant : cost::tuned_constants()) {
    tuning.*constant.value = constant.start;
    steps[constant.name] = std::min(0.2, constant.spread);
  }
  double best = loss(runs, tuning, left_out);
  constexpr int kRepeat = 4;
  const auto improve = [&](const cost::TunedConstant& constant, double factor) {
    bool moved = false;
    for (int i = 0; i < kRepeat; ++i) {
      cost::Tuning trial = tuning;
      trial.*constant.value = std::clamp(trial.*constant.value * factor, constant.low, constant.high);
      const double value = loss(runs, trial, left_out);
      if (value >= best - 1e-7) break;
      best = value, tuning = trial, moved = true;
    }
    return moved;
  };
  for (int round = 0; round < kRounds; ++round) {
    for (const cost::TunedConstant& constant : cost::tuned_constants()) {
      if (constant.spread == 0) continue;
      double& step = steps[constant.name];
      const bool moved = improve(constant, 1 + step) || improve(constant, 1 / (1 + step));
      step *= moved ? 1.2 : 0.5;
    }
  }
  return tuning;
}

Json constants_json(const cost::Tuning& tuning) {
  Json out;
  for (const cost::TunedConstant& constant : cost::tuned_constants()) out[constant.name] = tuning.*constant.value;
  return out;
}

Json summary(const std::vector<double>& errors) {
  double absolute = 0, bias = 0;
  for (double error : errors) absolute += std::fabs(error), bias += error;
  const double count = static_cast<double>(errors.size());
  return {{"n", errors.size()}, {"mean", 100 * absolute / count}, {"bias", 100 * bias / count}};
}

void run(const std::string& path, const std::string& out) {
  const std::vector<Run> runs = read(path);
  Json report;
  report["constants"] = constants_json(fit(runs, ""));
  for (const auto& [name, value] : report["constants"].items()) fmt::print("{} = {:.4g}\n", name, value.get<double>());
  const Errors shipped = errors_of(runs, {}, false);
  double sum = 0, sum_left = 0;
  std::vector<double> every;
  for (const auto& [source, errors] : shipped) {
    if (errors.size() < kLeast) continue;
    const std::vector<double> blind = errors_of(runs, fit(runs, source), false)[source];
    every.insert(every.end(), blind.begin(), blind.end());
    report["left_out"][source] = summary(blind);
    const Json in = summary(errors), left = report["left_out"][source];
    sum += in["mean"].get<double>(), sum_left += left["mean"].get<double>();
    fmt::print("{:<16}{:>5} runs   shipped {:>5.1f} ({:+.1f})   left out {:>5.1f} ({:+.1f})\n", source, errors.size(), in["mean"].get<double>(), in["bias"].get<double>(), left["mean"].get<double>(), left["bias"].get<double>());
  }
  report["left_out_all"] = summary(every);
  const double sources = static_cast<double>(report["left_out"].size());
  fmt::print("mean over sources: shipped {:.2f}, left out {:.2f}; all runs left out {:.2f}\n", sum / sources, sum_left / sources, report["left_out_all"]["mean"].get<double>());
  if (!out.empty()) write_text(out, report.dump(1) + "\n");
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  CLI::App app("Fit the cost model's constants to a table of runs and predict every source blind");
  std::string path, out;
  app.add_option("RUNS", path, "CSV file of runs with measured step times")->required();
  app.add_option("--json", out, "also write constants and errors to this file");
  CLI11_PARSE(app, argc, argv);
  try {
    weft::run(path, out);
  } catch (const weft::Error& error) {
    fmt::print(stderr, "fit_constants: {}\n", error.what());
    return static_cast<int>(error.exit_code());
  }
}
