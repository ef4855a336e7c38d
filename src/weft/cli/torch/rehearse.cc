// weft rehearse CONFIG.toml --world 64
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "weft/cli/torch/commands.h"
#include "weft/config/parse.h"
#include "weft/core/units.h"
#include "weft/memory/table.h"
#include "weft/train/metrics.h"
#include "weft/train/rehearse.h"

namespace weft::cli {
namespace {

struct RehearseOptions {
  std::string config;
  std::vector<std::string> overrides;
  int world = 1, rank = 0;
  bool json = false;
};

void print_json(const RehearseOptions& options, const train::Rehearsal& rehearsal) {
  nlohmann::ordered_json report{{"world", options.world}, {"rank", options.rank}, {"peak_bytes", rehearsal.memory.peak}};
  report["at_peak"] = nlohmann::ordered_json::parse(train::to_json(rehearsal.memory.at_peak));
  report["kept"] = nlohmann::ordered_json::parse(train::to_json(rehearsal.memory.live_of));
  report["allocations_per_step"] = rehearsal.allocations;
  for (const auto& [op, count] : rehearsal.traffic) {
    if (count.calls > 0) report["per_step"][op] = {{"calls", count.calls}, {"bytes", count.bytes}, {"sent", count.sent}};
  }
  fmt::print("{}\n", report.dump(2));
}

void print_text(const RehearseOptions& options, const train::Rehearsal& rehearsal) {
  fmt::print("rank {} of {}, without running it\n", options.rank, options.world);
  fmt::print("{}", memory::table("", {{"peak", rehearsal.memory.at_peak}, {"kept", rehearsal.memory.live_of}}));
  std::vector<std::string> calls;
  for (const auto& [op, count] : rehearsal.traffic) {
    if (count.calls > 0) calls.push_back(fmt::format("{} {} ({} sent)", count.calls, op, bytes_text(static_cast<double>(count.sent))));
  }
  fmt::print("per step       {} allocations{}{}\n", rehearsal.allocations, calls.empty() ? "" : "; ", fmt::join(calls, ", "));
}

void run_rehearse(const RehearseOptions& options) {
  const train::Rehearsal rehearsal = train::rehearse(config::load(options.config, options.overrides), options.rank, options.world);
  options.json ? print_json(options, rehearsal) : print_text(options, rehearsal);
}

}  // namespace

void add_rehearse(CLI::App& app) {
  auto options = std::make_shared<RehearseOptions>();
  CLI::App* command = app.add_subcommand("rehearse", "Memory and traffic of any rank of any world, from the real program without running it");
  command->add_option("config", options->config, "TOML file, as for weft train")->required();
  command->add_option("--set", options->overrides, "section.key=value, may be repeated")->take_all()->allow_extra_args(false);
  command->add_option("--world", options->world, "ranks")->capture_default_str();
  command->add_option("--rank", options->rank, "the one that is looked at")->capture_default_str();
  command->add_flag("--json", options->json, "print as JSON");
  command->footer("Example: weft rehearse configs/zero3.toml --world 64 --set train.global_batch=1024\n");
  command->callback([options] { run_rehearse(*options); });
}

}  // namespace weft::cli
