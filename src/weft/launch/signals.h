// Signals as readable events of one file descriptor.
#pragma once

#include <csignal>
#include <optional>

namespace weft::launch {

struct Signal {
  int number = 0;
  bool from_terminal = false;  ///< the terminal sent it to the whole foreground group
};

/// True under nohup for SIGHUP: whoever started this process asked that it outlives the terminal.
bool is_ignored(int signal);

/// Blocks SIGINT, SIGTERM, SIGUSR1, SIGHUP (unless it is ignored) and SIGCHLD for this thread and queues them; SIGPIPE is
/// ignored. Undone by the destructor, which drops what is queued.
class SignalQueue {
 public:
  SignalQueue();
  ~SignalQueue();
  SignalQueue(const SignalQueue&) = delete;
  SignalQueue& operator=(const SignalQueue&) = delete;

  int descriptor() const { return descriptor_; }
  /// The next signal, if one came. Never blocks.
  std::optional<Signal> next();

 private:
  int descriptor_ = -1;
  sigset_t before_{};
  struct sigaction pipe_before_ {};
};

}  // namespace weft::launch
