// `weft doctor`, `weft --version` and wrong commands, as a user meets them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <string>

#include "tests/support/command.h"
#include "weft/core/json.h"

namespace weft {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using ::weft::testing::CommandResult;
using ::weft::testing::TempDir;
using ::weft::testing::weft_command;
using ::weft::testing::weft_output;

TEST(Doctor, TellsWhatThisMachineOffers) {
  const CommandResult result = weft_output("doctor --json");
  EXPECT_EQ(result.exit_code, 0) << result.out;
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
  EXPECT_THAT(weft_output("doctor", place).out, HasSubstr("torchrun, rank 1 of 3"));
  const CommandResult wrong = weft_output("doctor", place + " LOCAL_RANK=5");
  EXPECT_EQ(wrong.exit_code, 0);
  EXPECT_THAT(wrong.out,
              AllOf(HasSubstr("! launcher:"), HasSubstr("LOCAL_RANK: 5 must be below LOCAL_WORLD_SIZE = 3")));
}

// Two ranks measure together; the file they write is a machine to plan for.
TEST(Bench, CalibratesIntoAFileThatThePlannerReads) {
  const TempDir dir;
  const std::string file = dir / "machine.toml";
  const auto measured = weft_command("run -n 2 -- " + std::string(WEFT_BINARY) + " bench calibrate --seconds 0.02 --out " + file);
  ASSERT_EQ(measured.exit_code, 0) << measured.err;
  const auto planned = weft_command("estimate --model gpt2 --precision fp32 --devices 2 --batch 8 --seq 256 --json --machine " + file);
  ASSERT_EQ(planned.exit_code, 0) << planned.err;
  EXPECT_THAT(planned.out, HasSubstr("(2 ranks)"));
  const auto json = nlohmann::json::parse(weft_command("bench calibrate --seconds 0.02 --json --out " + file).out);
  EXPECT_GT(json["matmul_fp32_gflops"].get<double>(), 0);
  for (const char* share : {"training_share_fp32", "training_share_bf16"}) EXPECT_GT(json[share].get<double>(), 0);
  EXPECT_EQ(json["devices"], 1);
  EXPECT_NE(weft_command("bench").exit_code, 0);
  EXPECT_EQ(weft_command("bench calibrate --seconds -1").exit_code, 2);
}

TEST(Command, VersionNamesLibtorchAndCompiler) {
  const CommandResult result = weft_command("--version");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, AllOf(StartsWith("weft "), HasSubstr("libtorch 2."), HasSubstr("; ")));
}

TEST(Command, UnknownNamesGetTheNearest) {
  const CommandResult top = weft_output("docter 2>&1");
  EXPECT_EQ(top.exit_code, 2);
  EXPECT_EQ(top.out, "weft: 'docter' is no command of weft; did you mean 'doctor'?\n");
  const CommandResult nested = weft_output("data inspekt x 2>&1");
  EXPECT_EQ(nested.exit_code, 2);
  EXPECT_EQ(nested.out, "weft: 'inspekt' is no command of weft data; did you mean 'inspect'?\n");
  EXPECT_EQ(weft_output("2>/dev/null").exit_code, 2);
  EXPECT_EQ(weft_output("doctor --jsn 2>/dev/null").exit_code, 2);
}

TEST(Command, HelpIsAResult) {
  for (const char* command : {"", "run", "doctor", "data prepare"}) {
    const CommandResult help = weft_command(std::string(command) + " --help");
    EXPECT_EQ(help.exit_code, 0) << command;
    EXPECT_THAT(help.out, HasSubstr("Example")) << command;
  }
}

}  // namespace
}  // namespace weft
