// `weft schedule` as a user runs it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "tests/support/command.h"
#include "weft/core/json.h"

namespace weft {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::weft::testing::CommandResult;

CommandResult schedule(const std::string& arguments, bool with_errors = false) {
  return with_errors ? testing::weft_output("schedule " + arguments) : testing::weft_command("schedule " + arguments);
}

class ScheduleCommand : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string file(const std::string& name, const std::string& content = {}) {
    const std::filesystem::path path = folder_ / name;
    if (!content.empty()) std::ofstream(path) << content;
    return path.string();
  }
  std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("weft_schedule_test_" + std::to_string(::getpid()));
};

TEST_F(ScheduleCommand, TextIsTheActionList) {
  EXPECT_EQ(schedule("1f1b --ranks 2 --microbatches 4 --text").out,
            "rank 0: F0 F1 B0 F2 B1 F3 B2 B3\nrank 1: F0 B0 F1 B1 F2 B2 F3 B3\n");
  EXPECT_EQ(schedule("gpipe --ranks 2 --microbatches 2 --csv").out, "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n");
}

TEST_F(ScheduleCommand, PlainDrawingOutsideATerminal) {
  const CommandResult answer = schedule("1f1b --ranks 2 --microbatches 3 --width 80");
  EXPECT_EQ(answer.exit_code, 0);
  EXPECT_EQ(answer.out,
            "1f1b: 2 ranks, 3 micro-batches, 2 stages\n\n"
            "rank 0 F0 F1 ......B0--- F2 B1--- ...B2--- \n"
            "rank 1 ...F0 B0--- F1 B1--- F2 B2--- ......\n"
            "\nF forward   B backward   . idle\n\n"
            "time       12, work 9 per rank\n"
            "bubble     25.0 %; formula 25.0 %: idle (p-1)(F+B) = 3\n"
            "in flight  2 1 micro-batches by rank\n");
}

TEST_F(ScheduleCommand, FitsTheWidthInColourAndPlain) {
  for (const char* colour : {"always", "never"}) {
    for (const char* name : {"1f1b", "zb-v", "interleaved", "gpipe"}) {
      for (const int width : {40, 80, 120}) {
        std::istringstream lines(schedule(std::string(name) + " --ranks 8 --microbatches 32 --color " + colour +
                                          " --width " + std::to_string(width))
                                     .out);
        for (std::string line; std::getline(lines, line);) {
          if (!line.starts_with("rank")) continue;
          int columns = 0;
          for (size_t k = 0; k < line.size(); ++k) {
            if (line[k] == '\x1b')
              k = line.find('m', k);
            else
              columns += (static_cast<unsigned char>(line[k]) & 0xC0) != 0x80;  // a character, not the rest of one
          }
          ASSERT_LE(columns, width) << name << " " << colour;
        }
      }
    }
  }
}

TEST_F(ScheduleCommand, JsonHasBubbleFormulaAndCounts) {
  const Json json = Json::parse(schedule("zb-h1 --ranks 4 --microbatches 8 --json").out);
  EXPECT_EQ(json["makespan"], 27.0);
  EXPECT_NEAR(json["bubble"].get<double>(), 3.0 / 27, 1e-12);
  EXPECT_NEAR(json["formula"]["bubble"].get<double>(), 3.0 / 27, 1e-12);
  EXPECT_EQ(json["in_flight"]["to_weight_gradient"], Json({4, 4, 4, 4}));
  EXPECT_TRUE(Json::parse(schedule("zb-h1 --ranks 4 --microbatches 3 --json").out)["formula"].is_null());
}

TEST_F(ScheduleCommand, WritesSvgAndTrace) {
  EXPECT_EQ(
      schedule("dualpipe-v --ranks 2 --microbatches 4 --svg " + file("a.svg") + " --trace " + file("a.json")).exit_code, 0);
  EXPECT_THAT(read_text(file("a.svg")), AllOf(HasSubstr("<svg"), HasSubstr("F3.0: "), HasSubstr("</svg>")));
  const Json trace = read_json(file("a.json"));
  int computes = 0;
  for (const Json& event : trace["traceEvents"]) computes += event["ph"] == "X" && event["tid"] == 0;
  EXPECT_EQ(computes, 16 + 16 + 5);  // a forward and a backward for 4 micro-batches on 4 stages; 5 backwards are split
}

TEST_F(ScheduleCommand, RunsAUsersOwnFile) {
  const std::string csv = file("own.csv", "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n");
  EXPECT_EQ(schedule(csv + " --text").out, "rank 0: F0 F1 B0 B1\nrank 1: F0 B0 F1 B1\n");
  const CommandResult bad = schedule(file("own.txt", "rank 0: F0 F1 B0 B1\nrank 1: F0 B0 B1 F1\n"), true);
  EXPECT_EQ(bad.exit_code, 2);
  EXPECT_THAT(bad.out, HasSubstr("rank 1 step 2: B1 needs F1, which comes only at step 3"));
  EXPECT_EQ(schedule(file("missing.csv")).exit_code, 2);
}

TEST_F(ScheduleCommand, BadArgumentsAreFindings) {
  for (const char* bad :
       {"1f2b", "1f1b --ranks 0", "1f1b --microbatches -1", "1f1b --chunks 2", "interleaved --chunks 0",
        "zb-v --chunks 3", "1f1b --time F", "1f1b --time F=0", "1f1b --time X=1", "1f1b --time F=nan",
        "1f1b --time send=-1", "1f1b --time F=1e300", "1f1b --color blue", "1f1b --text --csv", "1f1b --width -3",
        "gpipe --ranks 100000 --microbatches 100000"}) {
    const CommandResult answer = schedule(bad, true);
    EXPECT_EQ(answer.exit_code, 2) << bad << "\n" << answer.out;
    EXPECT_THAT(answer.out, Not(HasSubstr("internal"))) << bad;
  }
  EXPECT_THAT(schedule("1f1b --ranks 0 --microbatches 0", true).out,
              AllOf(HasSubstr("--ranks: is 0, must be at least 1"), HasSubstr("--microbatches: is 0")));
  EXPECT_THAT(schedule("zbv", true).out, HasSubstr("did you mean zb-v"));
}

}  // namespace
}  // namespace weft
