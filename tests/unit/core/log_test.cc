#include "weft/core/log.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

namespace weft {
namespace {

TEST(Log, GoesWhereTheHostProgramSays) {
  std::string said;
  LogSink before = set_log([&](LogLevel level, std::string_view text) {
    said += level == LogLevel::warning ? "warning " : "note ";
    said += text;
  });
  log(LogLevel::note, "a");
  log(LogLevel::warning, "b");
  set_log([](LogLevel, std::string_view) { throw std::runtime_error("no disk"); });
  log(LogLevel::note, "c");  // must not throw
  set_log({});
  log(LogLevel::note, "d");
  set_log(before);
  ::testing::internal::CaptureStderr();
  log(LogLevel::warning, "the first sink again");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "weft: warning: the first sink again\n");
  EXPECT_EQ(said, "note awarning b");
}

}  // namespace
}  // namespace weft
