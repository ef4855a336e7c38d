// weft verify CONFIG.toml --layouts "dp=2; tp=2"
#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "weft/cli/torch/commands.h"
#include "weft/config/parse.h"
#include "weft/core/error.h"
#include "weft/train/verify.h"

namespace weft::cli {
namespace {

struct VerifyCommand {
  std::string config, layouts, dtype = "fp64";
  std::vector<std::string> overrides;
  train::VerifyOptions options;
  bool json = false;
};

constexpr int kOutOfTolerance = 1;

void run_verify(const VerifyCommand& command) {
  config::RunConfig config = config::load(command.config, command.overrides);
  config.train.dtype = command.dtype;
  const std::vector<std::string> layouts = train::split_layouts(command.layouts);
  const VerifyReport report = train::verify(config, layouts, command.options);
  fmt::print("{}", command.json ? to_json(report) + "\n" : to_text(report));
  if (!report.ok()) throw CLI::RuntimeError(kOutOfTolerance);
}

}  // namespace

void add_verify(CLI::App& app) {
  auto command = std::make_shared<VerifyCommand>();
  CLI::App* verify = app.add_subcommand("verify", "Train a few steps under several layouts and compare losses, gradients and weights with one rank");
  verify->add_option("config", command->config, "TOML file, as for weft train; its layout is replaced")->required();
  verify->add_option("--set", command->overrides, "section.key=value, may be repeated")->take_all()->allow_extra_args(false);
  verify->add_option("--layouts", command->layouts,
                     "layouts apart by ;, settings by , out of dp, tp, zero, dp_shard, sequence_parallel, tp_overlap, reshard_after_forward, reshard_group, "
                     "prefetch, micro_batch, or any key of the configuration")->required();
  verify->add_option("--dtype", command->dtype, "fp64 hides no fault behind rounding; fp32, bf16, fp16")
      ->check(CLI::IsMember({"fp64", "fp32", "bf16", "fp16"}))->capture_default_str();
  verify->add_option("--steps", command->options.steps, "updates before the weights are compared")->check(CLI::Range(1, 1000))->capture_default_str();
  verify->add_option("--tolerance", command->options.tolerance, "largest relative difference; 0 = 1e-10 in fp64, looser in other dtypes")
      ->check(CLI::NonNegativeNumber)->capture_default_str();
  verify->add_flag("--json", command->json, "print as JSON");
  verify->footer("All ranks run on this machine, as threads of this process. Compared are losses, norms, gradients, weights, and what several\n"
                 "ranks must hold alike. Exit code 1: a layout is out of tolerance, and the first tensor that is out is named.\n\nExample: weft verify configs/demo.toml --set train.global_batch=4 --layouts \"dp=2; tp=2; dp_shard=2,zero=3,tp=2\"\n");
  verify->callback([command] { run_verify(*command); });
}

}  // namespace weft::cli
