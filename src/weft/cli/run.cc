// weft run: starts and supervises the ranks of a job on this machine.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <sstream>

#include "weft/cli/planner_commands.h"
#include "weft/core/error.h"
#include "weft/launch/launcher.h"

namespace weft::cli {
namespace {

/// "all", "none", or ranks and ranges: "0,2-3".
std::vector<int> parse_tee(const std::string& text, int ranks) {
  std::vector<int> shown;
  if (text == "none") return shown;
  if (text == "all") {
    for (int rank = 0; rank < ranks; ++rank) shown.push_back(rank);
    return shown;
  }
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const char* const end = part.data() + part.size();
    int first = 0;
    auto read = std::from_chars(part.data(), end, first);
    int last = first;
    if (read.ec == std::errc() && read.ptr != end && *read.ptr == '-') read = std::from_chars(read.ptr + 1, end, last);
    if (read.ec != std::errc() || read.ptr != end || last < first || last >= ranks) {
      throw ConfigError(fmt::format("--tee {}: '{}' is no rank or range of ranks from 0 to {} (or use all, none)", text,
                                    part, ranks - 1));
    }
    for (int rank = first; rank <= last; ++rank) shown.push_back(rank);
  }
  std::sort(shown.begin(), shown.end());
  shown.erase(std::unique(shown.begin(), shown.end()), shown.end());
  return shown;
}

struct RunArguments {
  launch::LaunchOptions launch;
  std::string tee = "0";
  double grace_seconds = 5;
};

void run_ranks(RunArguments& arguments) {
  launch::LaunchOptions& options = arguments.launch;
  if (options.ranks >= 1) options.tee = parse_tee(arguments.tee, options.ranks);  // else launch() names the fault
  options.grace = std::chrono::milliseconds(static_cast<int64_t>(arguments.grace_seconds * 1e3));
  // "weft" is this very program, also where it is not in PATH.
  if (!options.command.empty() && options.command.front() == "weft") {
    options.command.front() = std::filesystem::read_symlink("/proc/self/exe").string();
  }
  const int code = launch::launch(options);
  if (code != 0) throw CLI::RuntimeError(code);
}

}  // namespace

void add_run(CLI::App& app) {
  auto arguments = std::make_shared<RunArguments>();
  launch::LaunchOptions& options = arguments->launch;
  CLI::App* run = app.add_subcommand("run", "Start and supervise the ranks of a job on this machine");
  run->add_option("-n,--ranks", options.ranks, "Ranks to start")->required();
  run->add_option("--log-dir", options.log_dir,
                  "Folder for rank-R.log, in place of an earlier run's; by default a temporary one that is kept when a rank "
                  "fails (the last 10 of them)");
  run->add_option("--tee", arguments->tee, "Ranks whose output is shown live: 0 (default), 0,2-3, all, none");
  run->add_option("--max-restarts", options.max_restarts, "How often all ranks are started again after a failure")
      ->capture_default_str();
  run->add_option("--grace", arguments->grace_seconds, "Seconds from SIGTERM to SIGKILL when ranks are stopped")
      ->capture_default_str();
  run->add_option("PROGRAM", options.command, "Program and its arguments, after --")->required();
  run->positionals_at_end();
  run->footer(
      "Ranks get torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, ..., MASTER_ADDR, MASTER_PORT).\n"
      "SIGUSR1 makes weft train write who waits for whom to the log folder, for weft doctor FOLDER.\n"
      "Exit code: 0, or that of the first rank that failed (128 + signal).\n\n"
      "Example:\n  weft run -n 2 -- weft train configs/demo.toml\n  weft run -n 4 --tee all --log-dir logs -- "
      "./my_program --steps 10");
  run->callback([arguments] { run_ranks(*arguments); });
}

}  // namespace weft::cli
