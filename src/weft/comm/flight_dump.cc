#include "weft/comm/flight_dump.h"

#include <fmt/format.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

#include "weft/core/error.h"
#include "weft/core/log.h"

namespace weft {
namespace {

int event = -1;  // counts the signals; written by the handler

void on_signal(int) {
  const int error = errno;
  const uint64_t one = 1;
  static_cast<void>(!::write(event, &one, sizeof one));
  errno = error;
}

std::mutex mutex;
std::string& target() {
  static std::string& folder = *new std::string();
  return folder;
}

// Waits for signals until the process ends.
void serve() {
  for (uint64_t count; ::read(event, &count, sizeof count) == sizeof count || errno == EINTR;) {
    std::string folder;
    {
      const std::lock_guard lock(mutex);
      folder = target();
    }
    try {
      dump_flight_logs(folder);
      log(LogLevel::note, fmt::format("flight logs are in {}; read them with: weft doctor {}", folder, folder));
    } catch (const std::exception& e) {
      log(LogLevel::warning, e.what());
    }
  }
}

}  // namespace

void install_flight_signal(int signal, const std::string& folder) {
  const char* variable = std::getenv("WEFT_FLIGHT_DIR");
  const std::lock_guard lock(mutex);
  target() = !folder.empty() ? folder : variable && *variable ? variable : ".";
  if (event < 0) {
    event = ::eventfd(0, EFD_CLOEXEC);
    if (event < 0) throw ConfigError(fmt::format("no descriptor for the flight signal: {}", std::strerror(errno)));
    // The thread takes no signals: they belong to the program's own threads.
    sigset_t all, before;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread(serve).detach();
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  if (::sigaction(signal, &action, nullptr) != 0) {
    throw ConfigError(fmt::format("signal {} cannot be caught: {}", signal, std::strerror(errno)));
  }
}

}  // namespace weft
