// Real ranks for tests: threads of this process, or processes of this program.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "weft/comm/world.h"

namespace weft::testing {

/// Default deadline of test worlds: far above what a loaded two-core machine needs, far below CTest's time-out.
inline constexpr std::chrono::seconds kTestTimeout{30};

/// Runs body on n threads as ranks of the local back end, or of gloo. A gtest failure inside counts; an exception fails the
/// test.
void on_threads(int n, const std::function<void(World&)>& body, BackendKind backend = BackendKind::local);

/// A function that rank processes run, registered under a name at program start:
///   const RankBody kSum("sum", [](World& world, const std::string& argument) -> std::string { ... });
/// Its result text is returned to the test that started it. A failed EXPECT inside ends the process with exit code 1.
struct RankBody {
  RankBody(std::string name, std::function<std::string(World&, const std::string&)> body);
};

struct RankResult {
  int exit_code = 0;    ///< 128 + signal when killed; else Error::exit_code, or 1 for other exceptions and failed EXPECTs
  std::string result;   ///< what the body returned, or the text of the exception it threw
};

struct ProcessOptions {
  std::string backend = "local";                         ///< local or gloo
  std::chrono::milliseconds timeout = kTestTimeout;      ///< WorldOptions::timeout
  std::map<std::string, std::string> environment;        ///< variables besides torchrun's
};

/// Rank processes of this program, with torchrun's environment, an own port, and stdin closed. The destructor kills what
/// is still running; they also die with this process.
class RankProcesses {
 public:
  RankProcesses(int n, const std::string& body, const std::string& argument = "", ProcessOptions options = {});
  ~RankProcesses();
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  /// Returns when the body on `rank` has called note(text); false when it ended without, or after kPatience.
  bool await_note(int rank, const std::string& text);
  /// Sends SIGKILL, SIGSTOP, SIGCONT, ... to one rank.
  void signal(int rank, int number);
  /// Waits for the ranks that `expected` says (default all) and returns the results of all; others are killed then.
  std::vector<RankResult> wait(std::vector<int> ranks = {});
  pid_t pid(int rank) const { return processes_[static_cast<size_t>(rank)].pid; }

  /// Far above any deadline in tests, below CTest's time-out.
  static constexpr std::chrono::seconds kPatience{90};

 private:
  struct Process {
    pid_t pid = -1;
    int pipe = -1;
    std::string received;
    bool ended = false;
    int status = 0;
  };
  bool read_some(const std::function<bool()>& enough);
  void reap(Process& process, bool block);

  std::vector<Process> processes_;
};

/// In a rank process: tells the test that it has come so far.
void note(const std::string& text);

/// Starts n processes of this test program that run the named body with `argument` and waits for all of them.
/// backend: "local" or "gloo".
std::vector<RankResult> on_processes(int n, const std::string& body, const std::string& argument = "",
                                     const std::string& backend = "local");

}  // namespace weft::testing
