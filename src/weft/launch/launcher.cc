#include "weft/launch/launcher.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <random>

#include "weft/core/error.h"
#include "weft/core/progress.h"
#include "weft/core/system.h"
#include "weft/launch/attempt.h"
#include "weft/launch/environment.h"
#include "weft/launch/log_folder.h"
#include "weft/launch/signals.h"

namespace weft::launch {
namespace {

std::string random_id() {
  std::random_device source;
  return fmt::format("{:08x}{:08x}", source(), source());
}

/// Variables that are the same for all ranks of the job.
Environment job_environment(const LaunchOptions& options, const std::string& run_id) {
  Environment env = process_environment();
  // An outer launcher's place in its job is not a rank's place in this one.
  for (const char* outer : {"TORCHELASTIC_USE_AGENT_STORE", "WEFT_MASTER_LISTEN_FD", "GROUP_RANK", "ROLE_RANK"})
    env.erase(outer);
  const std::string size = std::to_string(options.ranks);
  for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"}) env[name] = size;
  env["GROUP_RANK"] = "0";
  env["GROUP_WORLD_SIZE"] = "1";
  env["MASTER_ADDR"] = "127.0.0.1";
  env["WEFT_RUN_ID"] = env["TORCHELASTIC_RUN_ID"] = run_id;
  env["TORCHELASTIC_MAX_RESTARTS"] = std::to_string(options.max_restarts);
  env.emplace("OMP_NUM_THREADS", std::to_string(std::max<int64_t>(1, usable_cores() / options.ranks)));
  const bool terminal = options.tee.size() == 1 && ::isatty(STDERR_FILENO);
  if (terminal) {  // the shown rank writes into a pipe and may still rewrite its progress line
    env["WEFT_PROGRESS"] = "terminal";
    env["COLUMNS"] = std::to_string(terminal_width(stderr));
  }
  return env;
}

void check(const LaunchOptions& options) {
  Findings findings;
  constexpr int kMostRanks = 256;  // each holds three descriptors, and 1024 is their usual limit
  if (options.ranks < 1 || options.ranks > kMostRanks) {
    findings.add("-n", fmt::format("{} ranks; from 1 to {} can be started on one machine", options.ranks, kMostRanks));
  }
  if (options.command.empty()) findings.add("PROGRAM", "is missing", "weft run -n 2 -- PROGRAM ARGUMENTS");
  for (const int rank : options.tee) {
    if (options.ranks >= 1 && (rank < 0 || rank >= options.ranks))
      findings.add("--tee", fmt::format("{} is no rank of 0 .. {}", rank, options.ranks - 1));
  }
  if (options.max_restarts < 0) findings.add("--max-restarts", fmt::format("{} is negative", options.max_restarts));
  if (options.grace.count() < 0) findings.add("--grace", fmt::format("{} ms is negative", options.grace.count()));
  findings.throw_if_any("weft run");
}

void report(const Outcome& outcome) {
  const Failure& failure = *outcome.failure;
  const size_t stopped = outcome.stopped;
  std::string text = fmt::format("weft run: rank {} {}", failure.rank, failure.how);
  if (outcome.interrupted)
    text += ", interrupted";
  else if (stopped > 0)
    text += fmt::format("; {} other rank{} stopped", stopped, stopped == 1 ? " was" : "s were");
  text += "\n";
  if (!failure.tail.empty()) {
    text += "weft run: its last output:\n";
    for (const std::string& line : failure.tail) text += "  | " + line + "\n";
  }
  text += fmt::format("weft run: log of rank {}: {}\n", failure.rank, failure.log.string());
  std::fputs(text.c_str(), stderr);
}

void report_flight_logs(const std::string& folder) {
  if (holds_flight_logs(folder)) std::fprintf(stderr, "weft run: who waited for whom: weft doctor %s\n", folder.c_str());
}

}  // namespace

int launch(const LaunchOptions& options) {
  check(options);
  SignalQueue signals;  // first: an interrupt from now on goes to the ranks, and what is made here is cleared up
  const std::string run_id = random_id();
  LogFolder folder(options.log_dir, run_id);
  Environment job = job_environment(options, run_id);
  job.emplace("WEFT_FLIGHT_DIR", std::filesystem::absolute(folder.path()).string());
  int code = 0;
  for (int restart = 0;; ++restart) {
    Attempt attempt(options, job, folder.path(), restart, signals);
    folder.keep(true);
    const Outcome outcome = attempt.run();
    code = outcome.failure ? outcome.failure->code : 0;
    if (!outcome.failure) break;
    const bool again =
        restart < options.max_restarts && !outcome.interrupted && code != static_cast<int>(ExitCode::config);
    report(outcome);
    report_flight_logs(job.at("WEFT_FLIGHT_DIR"));
    if (!again) break;
    std::fprintf(stderr, "weft run: restart %d of at most %d\n", restart + 1, options.max_restarts);
  }
  if (code == 0 && !holds_flight_logs(folder.path())) folder.keep(false);
  return code;
}

}  // namespace weft::launch
