#include "weft/launch/signals.h"

#include <fmt/format.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "weft/core/error.h"

namespace weft::launch {

bool is_ignored(int signal) {
  struct sigaction now {};
  return ::sigaction(signal, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
}

SignalQueue::SignalQueue() {
  sigset_t taken;
  sigemptyset(&taken);
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGCHLD}) sigaddset(&taken, signal);
  if (!is_ignored(SIGHUP)) sigaddset(&taken, SIGHUP);
  ::pthread_sigmask(SIG_BLOCK, &taken, &before_);
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &ignore, &pipe_before_);  // a closed stdout must not end the supervision
  descriptor_ = ::signalfd(-1, &taken, SFD_NONBLOCK | SFD_CLOEXEC);
  if (descriptor_ < 0) throw InternalError(fmt::format("signalfd: {}", std::strerror(errno)));
}

SignalQueue::~SignalQueue() {
  while (next()) {  // what came after the last rank had ended must not end the launcher in place of the job's own code
  }
  ::close(descriptor_);
  ::sigaction(SIGPIPE, &pipe_before_, nullptr);
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

std::optional<Signal> SignalQueue::next() {
  signalfd_siginfo info{};
  if (::read(descriptor_, &info, sizeof info) != sizeof info) return std::nullopt;
  return Signal{.number = static_cast<int>(info.ssi_signo), .from_terminal = info.ssi_code == SI_KERNEL};
}

}  // namespace weft::launch
