// `weft simulate` as a user runs it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "tests/support/command.h"
#include "weft/core/json.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using ::weft::testing::CommandResult;
using ::weft::testing::weft_output;

const std::string kJob = " --model llama3-8b --machine h100 --devices 8 --batch 32 --seq 4096 --tp 2 --pp 4";

TEST(SimulateCommand, AgreesWithEstimate) {
  const Json simulated = Json::parse(weft_output("simulate" + kJob + " --json").out);
  const Json estimated = Json::parse(weft_output("estimate" + kJob + " --json").out);
  EXPECT_EQ(simulated["estimated_step_s"], estimated["time"]["step_s"]);
  EXPECT_NEAR(simulated["step_s"].get<double>() / simulated["estimated_step_s"].get<double>(), 1, 0.1);
  EXPECT_EQ(simulated["peak_bytes"].size(), 4u);
  // More than 1F1B's own (p-1)/(m+p-1): the last rank also holds the head, and the others wait for it.
  EXPECT_GT(simulated["bubble"].get<double>(), 3.0 / 35);
  const auto busy = simulated["busy_s"].get<std::vector<double>>();
  EXPECT_GT(busy.back(), 1.1 * busy.front());
}

TEST(SimulateCommand, DrawsAndTraces) {
  const std::filesystem::path trace = std::filesystem::temp_directory_path() / ("weft_simulate_" + std::to_string(::getpid()) + ".json");
  const CommandResult answer = weft_output("simulate" + kJob + " --trace " + trace.string());
  EXPECT_EQ(answer.exit_code, 0) << answer.out;
  for (const char* text : {"rank 3 ", "bubble", "peak memory by rank", "in closed form"}) EXPECT_THAT(answer.out, HasSubstr(text));
  int counters = 0;
  const Json events = read_json(trace);
  for (const Json& event : events["traceEvents"]) counters += event["ph"] == "C";
  EXPECT_GE(counters, 4 * 8);
  std::filesystem::remove(trace);
}

TEST(SimulateCommand, BadArgumentsAreFindings) {
  for (const char* bad : {"simulate --schedule 2f2b --pp 2", "simulate --pp 3", "simulate --schedule zb-v --pp 2 --chunks 4", "simulate --color blue", "simulate --devices 0"}) {
    const CommandResult answer = weft_output(bad);
    EXPECT_EQ(answer.exit_code, 2) << bad << "\n" << answer.out;
  }
}

}  // namespace
}  // namespace weft
