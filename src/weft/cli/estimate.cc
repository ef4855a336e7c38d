// weft estimate: memory and step time of one layout, or of a table of runs.
#include <fmt/format.h>

#include <cmath>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>

#include "weft/cli/job_options.h"
#include "weft/cli/layout_options.h"
#include "weft/cli/planner_commands.h"
#include "weft/core/error.h"
#include "weft/core/json.h"
#include "weft/core/units.h"
#include "weft/cost/memory.h"
#include "weft/plan/campaign.h"
#include "weft/plan/report.h"
#include "weft/plan/runs.h"

namespace weft::cli {
namespace {

constexpr double kMost = 1e18;  // of counts and durations: what double still counts exactly enough

struct Options {
  JobOptions job;
  LayoutOptions layout;
  std::string runs, out, row;
  double tokens = 0, device_mttf_hours = 50000, save_s = 60, restart_s = 600;
  double inference_bits = 0;
  int64_t inference_sequences = 1;
};

void print(const plan::Job& job, const plan::Estimate& estimate, const Options& options) {
  const plan::Rates& rates = options.job.rates;
  std::optional<plan::Campaign> campaign;
  if (options.tokens > 0) campaign = plan::campaign(job, estimate, {options.tokens, options.device_mttf_hours * 3600, options.save_s, options.restart_s});
  if (options.job.json) {
    Json out = plan::estimate_json(job, estimate, rates);
    if (campaign) out["campaign"] = plan::campaign_json(*campaign, rates);
    std::cout << out.dump(2) << "\n";
    return;
  }
  std::cout << plan::estimate_text(job, estimate, rates);
  if (campaign) std::cout << plan::campaign_text(*campaign, rates);
}

/// Memory to serve a model: weights at `bits`, keys and values of the sequences in flight.
void estimate_inference(const Options& options) {
  const model::ModelSpec spec = options.job.spec();
  const double sequence = static_cast<double>(options.job.resolved_sequence(spec)), parameters = static_cast<double>(model::parameter_count(spec));
  const double weights = cost::weight_bytes(parameters, options.inference_bits), token = cost::kv_cache_bytes_per_token(spec);
  const double cache = token * sequence * static_cast<double>(options.inference_sequences);
  const machine::Device& device = options.job.resolved_machine().device;
  const double devices = std::ceil((weights + cache) / (device.memory_gib * 1024 * 1024 * 1024));
  if (options.job.json) {
    std::cout << Json({{"weights_bytes", weights}, {"kv_cache_bytes_per_token", token}, {"kv_cache_bytes", cache}, {"least_devices", devices}}).dump(2) << "\n";
    return;
  }
  std::cout << fmt::format("{}: {} parameters at {:g} bit\n  weights            {:>12} = {:.1f} GB\n  KV cache per token {:>12}\n  KV cache           {:>12}  {} sequences of {:.0f} tokens\n  needs {:.0f} x {} or more\n", spec.name,
                           count_text(parameters), options.inference_bits, bytes_text(weights), weights / 1e9, bytes_text(token), bytes_text(cache), options.inference_sequences, sequence, devices, device.name);
}

void estimate_one(const Options& options) {
  const plan::Job job = job_of(options.job, options.layout);
  print(job, plan::estimate(job, options.job.tuning()), options);
}

/// A module of the user's own.
void estimate_program(const Options& options) {
  const plan::ProgramEstimate estimate = plan::estimate(program_job_of(options.job, options.layout), options.job.tuning());
  std::cout << (options.job.json ? plan::program_json(estimate).dump(2) + "\n" : plan::program_text(estimate));
}

void estimate_runs(const Options& options) {
  const cost::Tuning tuning = options.job.tuning();
  const std::vector<plan::RunRow> rows = plan::read_runs(options.runs);
  if (!options.row.empty()) {
    for (const plan::RunRow& row : rows) {
      if (row.text("id") != options.row) continue;
      std::vector<std::string> assumptions;
      const plan::Job job = plan::job_of_run(row, assumptions);
      return print(job, plan::estimate(job, tuning), options);
    }
    throw ConfigError("--row " + options.row + ": no such id in " + options.runs);
  }
  std::vector<plan::RunPrediction> predictions;
  size_t missing = 0;
  for (const plan::RunRow& row : rows) {
    predictions.push_back(plan::predict_run(row, tuning));
    missing += predictions.back().reason.empty() ? 0 : 1;
  }
  std::ostringstream text;
  plan::write_predictions(text, predictions);
  if (options.out.empty()) std::cout << text.str();
  else write_text(options.out, text.str());
  std::cerr << fmt::format("{} rows, {} predicted, {} lack a column (see reason)\n", rows.size(), rows.size() - missing, missing);
}

}  // namespace

void add_estimate(CLI::App& app) {
  CLI::App* command = app.add_subcommand("estimate", "Memory and step time of one layout, or of a table of runs");
  auto options = std::make_shared<Options>();
  options->job.add_to(*command);
  options->layout.add_to(*command);
  CLI::Option* runs = command->add_option("--runs", options->runs, "CSV file of runs, one per row");
  command->add_option("--out", options->out, "with --runs: file for id,step_time_s,peak_mem_gb,fits,p_fit,reason; default stdout")->needs(runs);
  command->add_option("--row", options->row, "with --runs: show the estimate of this id")->needs(runs);
  command->add_option("--tokens", options->tokens, "tokens of the whole training: days, price, checkpoint interval")->check(number_in(1, kMost));
  command->add_option("--device-mttf", options->device_mttf_hours, "mean hours to failure of one device (Llama 3 report: 45,000 to 50,000)")->check(number_in(0, kMost, true))->capture_default_str();
  command->add_option("--save", options->save_s, "seconds that one checkpoint blocks training")->check(number_in(0, kMost))->capture_default_str();
  command->add_option("--restart", options->restart_s, "seconds from a failure to the next step")->check(number_in(0, kMost))->capture_default_str();
  command->add_option("--inference", options->inference_bits, "memory to serve the model at this many bits per weight: 16, 8, 4, ...")->check(number_in(1, 32));
  command->add_option("--sequences", options->inference_sequences, "with --inference: sequences in flight")->check(number_in(1, kMost))->capture_default_str();
  command->footer("Example:\n  weft estimate --model llama3-70b --machine h100 --devices 64 --batch 512 --seq 8192 --tp 8 --pp 4 --chunks 5");
  command->callback([options, command] {
    options->job.read_config(*command);
    if (!options->runs.empty()) estimate_runs(*options);
    else if (!options->job.program.empty()) estimate_program(*options);
    else if (options->inference_bits != 0) estimate_inference(*options);
    else estimate_one(*options);
  });
}

}  // namespace weft::cli
