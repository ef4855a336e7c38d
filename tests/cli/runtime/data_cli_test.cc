// weft data as a user runs it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/command.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using ::weft::testing::TempDir;
using ::weft::testing::weft_command;

TEST(DataCommand, PreparesFromAPipeAndInspects) {
  const TempDir dir;
  const auto prepared =
      ::weft::testing::run_command("yes 'some text' | head -c 1000 | " + std::string(WEFT_BINARY) +
                                   " data prepare - --out " + (dir / "out") + " --val-fraction 0.1 --json");
  ASSERT_EQ(prepared.exit_code, 0) << prepared.err;
  const auto report = nlohmann::json::parse(prepared.out);
  EXPECT_EQ(report["train"]["tokens"], 900);
  EXPECT_EQ(report["val"]["tokens"], 100);

  const auto inspected = weft_command("data inspect --check --json " + (dir / "out/train.bin"));
  ASSERT_EQ(inspected.exit_code, 0) << inspected.err;
  const auto file = nlohmann::json::parse(inspected.out);
  EXPECT_EQ(file["tokens"], 900);
  EXPECT_EQ(file["vocab"], 256);
  EXPECT_EQ(file["tokenizer"], "bytes");
  EXPECT_EQ(file["first"][0], 's');
  EXPECT_THAT(weft_command("data inspect " + (dir / "out/val.bin")).out, HasSubstr("tokens           100"));
}

TEST(DataCommand, MistakesExitWith2AndNameTheFile) {
  const TempDir dir;
  std::ofstream(dir / "text") << "hello";
  const auto foreign = weft_command("data inspect " + (dir / "text"));
  EXPECT_EQ(foreign.exit_code, 2);
  EXPECT_THAT(foreign.err, HasSubstr(dir / "text"));
  EXPECT_EQ(foreign.out, "");
  EXPECT_EQ(weft_command("data prepare " + (dir / "none") + " --out " + (dir / "out")).exit_code, 2);
  EXPECT_EQ(weft_command("data prepare --out " + (dir / "out")).exit_code, 2);
}

}  // namespace
}  // namespace weft
