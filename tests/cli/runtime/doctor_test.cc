// `weft doctor`, `weft --version` and wrong commands, as a user meets them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <string>

#include "weft/core/json.h"

namespace weft {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

struct Result {
  int code = 0;
  std::string out;
};

/// Output of both streams unless the arguments redirect one.
Result weft(const std::string& arguments, const std::string& environment = "") {
  Result result;
  std::FILE* pipe = ::popen((environment + " " WEFT_BINARY " " + arguments).c_str(), "r");
  char buffer[4096];
  while (const size_t count = std::fread(buffer, 1, sizeof buffer, pipe)) result.out.append(buffer, count);
  result.code = WEXITSTATUS(::pclose(pipe));
  return result;
}

TEST(Doctor, TellsWhatThisMachineOffers) {
  const Result result = weft("doctor --json");
  EXPECT_EQ(result.code, 0) << result.out;
  const Json report = parse_json(result.out, "doctor");
  EXPECT_THAT(report["version"].get<std::string>(), HasSubstr("libtorch 2."));
  EXPECT_GE(report["cpu"]["cores"].get<int>(), 1);
  EXPECT_GT(report["memory"]["total_bytes"].get<double>(), report["memory"]["available_bytes"].get<double>());
  EXPECT_TRUE(report["backends"]["local"].get<bool>());
  EXPECT_TRUE(report["backends"]["gloo"].get<bool>());
  EXPECT_TRUE(report["findings"].is_array());
}

TEST(Doctor, ShowsThePlaceOfARankAndWhatIsWrongWithIt) {
  const std::string place = "RANK=1 LOCAL_RANK=1 WORLD_SIZE=3 LOCAL_WORLD_SIZE=3 MASTER_PORT=4000";
  EXPECT_THAT(weft("doctor", place).out, HasSubstr("torchrun, rank 1 of 3"));
  const Result wrong = weft("doctor", place + " LOCAL_RANK=5");
  EXPECT_EQ(wrong.code, 0);
  EXPECT_THAT(wrong.out,
              AllOf(HasSubstr("! launcher:"), HasSubstr("LOCAL_RANK: 5 must be below LOCAL_WORLD_SIZE = 3")));
}

TEST(Command, VersionNamesLibtorchAndCompiler) {
  const Result result = weft("--version 2>/dev/null");
  EXPECT_EQ(result.code, 0);
  EXPECT_THAT(result.out, AllOf(StartsWith("weft "), HasSubstr("libtorch 2."), HasSubstr("; ")));
}

TEST(Command, UnknownNamesGetTheNearest) {
  const Result top = weft("docter 2>&1");
  EXPECT_EQ(top.code, 2);
  EXPECT_EQ(top.out, "weft: 'docter' is no command of weft; did you mean 'doctor'?\n");
  const Result nested = weft("data inspekt x 2>&1");
  EXPECT_EQ(nested.code, 2);
  EXPECT_EQ(nested.out, "weft: 'inspekt' is no command of weft data; did you mean 'inspect'?\n");
  EXPECT_EQ(weft("2>/dev/null").code, 2);
  EXPECT_EQ(weft("doctor --jsn 2>/dev/null").code, 2);
}

TEST(Command, HelpIsAResult) {
  for (const char* command : {"", "run", "doctor", "data prepare"}) {
    const Result help = weft(std::string(command) + " --help 2>/dev/null");
    EXPECT_EQ(help.code, 0) << command;
    EXPECT_THAT(help.out, HasSubstr("Example")) << command;
  }
}

}  // namespace
}  // namespace weft
