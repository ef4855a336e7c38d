#include "weft/core/log.h"

#include <cstdio>
#include <mutex>
#include <utility>

namespace weft {
namespace {

struct Log {
  std::mutex mutex;
  LogSink sink = [](LogLevel level, std::string_view text) {
    std::fprintf(stderr, "weft: %s%.*s\n", level == LogLevel::warning ? "warning: " : "", static_cast<int>(text.size()),
                 text.data());
  };
};

// Never destroyed: threads may speak until the process ends.
Log& the_log() {
  static Log& log = *new Log();
  return log;
}

}  // namespace

LogSink set_log(LogSink sink) {
  const std::lock_guard lock(the_log().mutex);
  return std::exchange(the_log().sink, std::move(sink));
}

void log(LogLevel level, std::string_view text) noexcept {
  try {
    const std::lock_guard lock(the_log().mutex);
    if (the_log().sink) the_log().sink(level, text);
  } catch (...) {
    // A note must not end the program that it is about.
  }
}

}  // namespace weft
