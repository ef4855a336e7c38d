// Writing to a connection whose peer is gone must be an error, not the end of this process.
#pragma once

#include <csignal>
#include <ctime>

namespace weft::detail {

/// SIGPIPE is blocked for this thread while the object lives, and for good in threads that are started meanwhile. gloo writes to
/// its sockets without MSG_NOSIGNAL; the signal goes to the thread that writes, and ends a C++ program without a word
/// (Python ignores it). The process's own handling of the signal is left alone.
class PipeSignalBlocked {
 public:
  PipeSignalBlocked() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    sigset_t pending;
    sigpending(&pending);
    pending_before_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~PipeSignalBlocked() {
    // One that a write raised meanwhile must not arrive now.
    constexpr timespec kAtOnce{};
    if (!pending_before_) sigtimedwait(&pipe_, nullptr, &kAtOnce);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  PipeSignalBlocked(const PipeSignalBlocked&) = delete;
  PipeSignalBlocked& operator=(const PipeSignalBlocked&) = delete;

 private:
  sigset_t pipe_{}, before_{};
  bool pending_before_ = false;
};

}  // namespace weft::detail
