// One start of all ranks, watched until the last has ended.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "weft/launch/environment.h"
#include "weft/launch/launcher.h"
#include "weft/launch/output.h"
#include "weft/launch/signals.h"

namespace weft::launch {

/// The rank that is to blame.
struct Failure {
  int rank = -1;
  int code = 0;     ///< its exit code, or 128 + signal
  std::string how;  ///< "exited with code 7 after 3 s"
  std::deque<std::string> tail;
  std::filesystem::path log;
};

struct Outcome {
  std::optional<Failure> failure;
  size_t stopped = 0;        ///< ranks that were still running when the failure was found
  bool interrupted = false;  ///< a SIGINT or SIGTERM was forwarded
};

class Attempt {
 public:
  /// Starts the ranks. ConfigError when the program cannot be started; none is left running then.
  Attempt(const LaunchOptions& options, const Environment& job, const std::filesystem::path& log_dir, int restart,
          SignalQueue& signals);
  ~Attempt();
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;

  Outcome run();

 private:
  using Clock = std::chrono::steady_clock;

  struct Rank {
    Rank(int rank, const std::filesystem::path& log, Show show) : output(rank, log, show) {}
    RankOutput output;
    pid_t pid = -1;
    bool running = false;
    bool own_group = true;
    int pipes[2] = {-1, -1};  ///< ends from which stdout and stderr are read; -1 once at end of file
    int code = 0;
    Clock::duration lived{};
  };

  void start(int rank, const Environment& job, int restart, int port, int listen_fd);
  void wait_for_events(std::optional<Clock::time_point> until);
  void read_output(Rank& rank, RankOutput::Stream stream);
  void reap();
  void note_failure(int rank);
  void on_signal(const Signal& signal);
  void ask_for_flight_logs();
  void kill_all(int signal);
  void stop_others();
  void drain();
  size_t running() const;
  Outcome outcome();

  const LaunchOptions& options_;
  SignalQueue& signals_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  Clock::time_point started_ = Clock::now();
  int blamed_ = -1;  ///< first failure by the rule in launcher.h; -1: none
  size_t stopped_ = 0;
  bool interrupted_ = false, stopping_ = false;
  std::optional<Clock::time_point> stop_at_;  ///< when SIGTERM follows a CommError that is alone so far
  std::optional<Clock::time_point> kill_at_;  ///< when SIGKILL follows SIGTERM
};

}  // namespace weft::launch
