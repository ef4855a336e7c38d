// The programs in examples/ print the same losses on 1, 2 and 3 ranks, and the losses fall.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <regex>
#include <vector>

#include "tests/support/command.h"
#include "tests/support/tolerances.h"
#include "weft/core/json.h"

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
                                                              "recurrent 0", "recurrent 1", "recurrent 3", "pipeline"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::ranges::replace(name, ' ', '_');
                           return name;
                         });

/// examples/describe.cc counts, with and without memory, what arithmetic says; the planner reads its file.
TEST(Describe, CountsAModuleThatThePlannerThenPlans) {
  const std::string program = folder_of_programs() + "/example_describe", file = ::testing::TempDir() + "/weft_described_net.json";
  const double conv1 = 2.0 * 8 * 32 * 32 * 32 * 27, conv2 = 2.0 * 8 * 64 * 16 * 16 * 288, hidden = 2.0 * 8 * 16384 * 512, out = 2.0 * 8 * 512 * 10;
  const auto answer = testing::run_command(program + " " + file);
  ASSERT_EQ(answer.exit_code, 0) << answer.err;
  const Json spec = read_json(file);
  EXPECT_EQ(spec["parameters"].get<double>(), 864 + 18432 + 16384 * 512 + 5120);
  EXPECT_EQ(spec["forward_flops"].get<double>(), conv1 + conv2 + hidden + out);
  EXPECT_EQ(spec["backward_flops"].get<double>(), conv1 + 2 * (conv2 + hidden + out));  // images need no gradient
  EXPECT_EQ(spec["saved_bytes"].get<double>(), 4.0 * 8 * (32 * 32 * 32 + 64 * 16 * 16 + 512 + 10));
  EXPECT_GE(spec["peak_bytes"].get<double>(), spec["saved_bytes"].get<double>());
  EXPECT_EQ(spec["samples"], 8);
  const auto plan = testing::weft_command("plan --spec " + file + " --machine h100 --devices 4 --batch 4096 --precision fp32");
  EXPECT_EQ(plan.exit_code, 0) << plan.err;
  EXPECT_THAT(plan.out, ::testing::HasSubstr("dp4 zero"));
  EXPECT_EQ(testing::weft_command("estimate --spec " + file + " --devices 4 --batch 4096 --micro-batch 64").exit_code, 0);
  // On the meta device: what no machine here holds; and what libtorch cannot do there is said.
  ASSERT_EQ(testing::run_command(program + " " + file + " wide").exit_code, 0);
  const Json wide = read_json(file);
  const double matrix = 65536.0 * 65536;
  EXPECT_EQ(wide["parameters"].get<double>(), 2 * matrix);
  EXPECT_EQ(wide["forward_flops"].get<double>(), 2 * 2 * 8 * matrix);
  EXPECT_EQ(wide["backward_flops"].get<double>(), 3 * 2 * 8 * matrix);
  EXPECT_EQ(wide["saved_bytes"].get<double>(), 2.0 * 8 * 65536 * 4);
  const auto refused = testing::run_command(program + " " + file + " meta");
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.err, ::testing::HasSubstr("describe it on the CPU"));
}

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
