// weft train CONFIG.toml
#include <fmt/format.h>

#include <ATen/Parallel.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "weft/cli/torch/commands.h"
#include "weft/comm/flight_dump.h"
#include "weft/config/machine_file.h"
#include "weft/config/parse.h"
#include "weft/core/error.h"
#include "weft/core/system.h"
#include "weft/memory/cpu_allocator.h"
#include "weft/train/display.h"
#include "weft/train/job.h"
#include "weft/train/memory_report.h"
#include "weft/train/prediction.h"
#include "weft/train/run_folder.h"
#include "weft/train/trainer.h"

namespace weft::cli {
namespace {

struct TrainOptions {
  std::string config, plan, machine;
  std::vector<std::string> overrides;
  bool explain = false, dry_run = false, json = false, memory = false;
};

constexpr double kGiB = 1 << 30;

volatile std::sig_atomic_t stop_signal = 0;

/// The first SIGINT, SIGTERM or SIGHUP asks for a stop after the current step; the second has its usual effect.
void on_signal(int signal) {
  stop_signal = signal;
  std::signal(signal, SIG_DFL);
}

void install_stop_signals() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  struct sigaction hangup {};
  sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);  // ignored under nohup
}

void set_threads(const train::Job& job, const World& world) {
  at::set_num_threads(train::rank_threads(job, usable_cores(), world.local_size()));
}

void print_job(const train::Job& job, bool json) {
  const std::string problem = train::run_folder_problem(job.config.run);
  if (!problem.empty()) throw ConfigError(problem);
  fmt::print("{}", json ? train::describe_json(job) + "\n" : train::describe(job));
}

/// The measured machine: the file that was named, else what `weft bench calibrate` left in this folder.
std::optional<machine::Machine> measured_machine(const TrainOptions& options) {
  static constexpr const char* kUsual = "machine.toml";
  if (options.machine.empty() && !std::filesystem::exists(kUsual)) return std::nullopt;
  return config::read_machine(options.machine.empty() ? kUsual : options.machine);
}

/// Rank 0's run beside what was predicted for it.
struct Watch {
  train::Prediction prediction;
  std::vector<double> step_s;

  /// The median, without the first step, which allocates.
  double median() const {
    std::vector<double> times(step_s.begin() + (step_s.size() > 1 ? 1 : 0), step_s.end());
    if (times.empty()) return 0;
    std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
    return times[times.size() / 2];
  }
};

void print_result(const config::RunConfig& config, const train::RunResult& result, const TrainOptions& options, const Watch& watch) {
  const int64_t peak = result.memory.empty() ? 0 : result.memory.front().peak;
  if (options.json) {
    nlohmann::ordered_json report{
        {"dir", config.run.dir}, {"steps", result.steps}, {"stopped", result.stopped}, {"loss", result.loss}};
    report["val_loss"] = result.val_loss ? nlohmann::ordered_json(*result.val_loss) : nlohmann::ordered_json(nullptr);
    if (result.bubble) report["bubble"] = {{"schedule", result.bubble->schedule}, {"measured", result.bubble->measured}, {"planned", result.bubble->planned}};
    if (result.offload) report["offload"] = nlohmann::ordered_json::parse(train::to_json(*result.offload));
    for (const memory::Usage& usage : result.memory) {
      report["memory"].push_back(nlohmann::ordered_json::parse(train::to_json(usage.at_peak)));
    }
    const auto& [bytes, step, missing] = watch.prediction;
    report["predicted"] = {{"peak_bytes", bytes ? nlohmann::ordered_json(*bytes) : nlohmann::ordered_json(nullptr)}, {"step_s", step ? nlohmann::ordered_json(*step) : nlohmann::ordered_json(nullptr)}};
    report["measured"] = {{"peak_bytes", peak}, {"step_s", watch.median()}};
    fmt::print("{}\n", report.dump(2));
    return;
  }
  fmt::print("{} after {} steps: loss {:.4f}{}; run folder {}\n", result.stopped ? "stopped" : "done", result.steps,
             result.loss,
             result.val_loss ? fmt::format(", validation loss {:.4f} nats per token", *result.val_loss) : "",
             config.run.dir);
  if (result.bubble) {
    fmt::print("pipeline {}: bubble {:.1f}% measured, {:.1f}% planned with equal stages\n", result.bubble->schedule, 100 * result.bubble->measured,
               100 * result.bubble->planned);
  }
  if (result.offload) fmt::print("{}", train::to_text(*result.offload));
  fmt::print("{}", train::memory_table(result.memory, options.memory));
  fmt::print("{}", train::comparison(watch.prediction, peak, watch.median()));
}

void run_train(const TrainOptions& options) {
  if (options.explain) {
    fmt::print("{}", config::to_toml(config::RunConfig(), true));
    return;
  }
  if (options.config.empty() && options.plan.empty())
    throw ConfigError("weft train needs a configuration file (or --explain-config to see all keys)");
  std::vector<std::string> overrides = options.plan.empty() ? std::vector<std::string>() : config::read_plan(options.plan);
  overrides.insert(overrides.end(), options.overrides.begin(), options.overrides.end());
  const config::RunConfig config = config::load(options.config, overrides);
  World world = World::init(train::world_options(config));
  if (options.dry_run) {
    const train::Job job = train::make_job(config, world.size());
    if (world.rank() == 0) print_job(job, options.json);
    return;
  }
  install_cpu_allocator();
  memory::set_limit(static_cast<int64_t>(config.train.memory_limit_gb * kGiB));
  install_stop_signals();
  install_flight_signal();
  train::StepDisplay display(config.train.steps);
  const std::optional<machine::Machine> machine = measured_machine(options);
  Watch watch;
  const train::RunHooks hooks{.on_job = [&](const train::Job& job) {
                                set_threads(job, world);
                                if (world.rank() == 0) watch.prediction = train::predict(job, world.size(), machine);
                              },
                              .stop_requested = [] { return stop_signal != 0; },
                              .on_step = [&](const train::StepRecord& record) {
                                watch.step_s.push_back(record.step_s);
                                display.show(record);
                              }};
  guard(world, [&] {
    const train::RunResult result = train::run(config, world, hooks);
    if (world.rank() == 0) print_result(config, result, options, watch);
  });
}

}  // namespace

void add_train(CLI::App& app) {
  auto options = std::make_shared<TrainOptions>();
  CLI::App* command = app.add_subcommand("train", "Train a model as a TOML file says, on one or many ranks");
  command->add_option("config", options->config,
                      "TOML file; every key has a default but data.train and the model's size");
  command->add_option("--set", options->overrides, "section.key=value, may be repeated")
      ->take_all()
      ->allow_extra_args(false);
  command->add_option("--plan", options->plan, "file of weft plan --out: its layout, micro-batch, dtype and recompute replace those of the configuration; --set comes after it");
  command->add_flag("--dry-run", options->dry_run,
                    "check everything, print sizes and what follows from the global batch, do not train");
  command->add_flag("--explain-config", options->explain, "print every key with its default and meaning, as TOML");
  command->add_flag("--memory", options->memory,
                    "print the memory table of every rank at the end, not only the largest");
  command->add_option("--machine", options->machine, "file of weft bench calibrate, for the predicted step time; default: machine.toml where it exists");
  command->add_flag("--json", options->json, "print the result as JSON");
  command->footer("Example: weft run -n 2 -- weft train configs/demo.toml --set train.steps=100\n");
  command->callback([options] { run_train(*options); });
}

}  // namespace weft::cli
