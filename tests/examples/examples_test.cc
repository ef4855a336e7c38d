// The programs in examples/ print the same losses on 1, 2 and 3 ranks, and the losses fall.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <regex>
#include <vector>

#include "tests/support/command.h"
#include "tests/support/tolerances.h"

namespace weft {
namespace {

std::vector<double> losses_of(const std::string& out) {
  std::vector<double> losses;
  const std::regex number("loss ([0-9.]+)");
  for (std::sregex_iterator it(out.begin(), out.end(), number), end; it != end; ++it) losses.push_back(std::stod((*it)[1]));
  return losses;
}

std::string folder_of_programs() { return std::string(WEFT_BINARY).substr(0, std::string(WEFT_BINARY).rfind('/')); }

/// name: of the program, and its arguments.
std::vector<double> run_example(const std::string& name, int ranks) {
  const std::string program = folder_of_programs() + "/example_" + name;
  const auto result = ranks == 1 ? testing::run_command(program)
                                 : testing::weft_command("run -n " + std::to_string(ranks) + " -- " + program);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  return losses_of(result.out);
}

class Example : public ::testing::TestWithParam<const char*> {};

TEST_P(Example, GivesOneRanksNumbers) {
  const std::vector<double> reference = run_example(GetParam(), 1);
  ASSERT_GE(reference.size(), 5U);
  EXPECT_LT(reference.back(), 0.7 * reference.front()) << "it does not learn";
  for (const int ranks : {2, 3}) {
    const std::vector<double> losses = run_example(GetParam(), ranks);
    ASSERT_EQ(losses.size(), reference.size());
    // fp64, and 12 decimals are printed of losses above 0.01.
    for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], reference[i], testing::kFp64Parity * reference[i]) << ranks << " ranks, line " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Programs, Example, ::testing::Values("data_parallel", "conv_batch_norm", "conv_batch_norm 2", "conv_batch_norm 3", "force_field",
                                                              "recurrent 0", "recurrent 1", "recurrent 3"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::ranges::replace(name, ' ', '_');
                           return name;
                         });

/// examples/verify_layouts.cc finds the mistake that it can be given.
TEST(VerifyLayouts, PassesAndNamesWhatIsBroken) {
  const std::string program = folder_of_programs() + "/example_verify_layouts";
  for (const std::string& start : {program, "run -n 2 -- " + program}) {
    const bool alone = start == program;
    const auto right = alone ? testing::run_command(start) : testing::weft_command(start);
    EXPECT_EQ(right.exit_code, 0) << right.out << right.err;
    EXPECT_THAT(right.out, ::testing::HasSubstr("tp=2,sequence_parallel=true"));
    const auto broken = alone ? testing::run_command(start + " broken") : testing::weft_command(start + " broken");
    EXPECT_EQ(broken.exit_code, 1) << broken.out << broken.err;
    EXPECT_THAT(broken.out, ::testing::HasSubstr("OUT: gradient of second.norm.weight"));
  }
}

}  // namespace
}  // namespace weft
