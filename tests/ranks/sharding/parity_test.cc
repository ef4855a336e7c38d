// Every position of the dial gives one rank's losses, norms, gradients and weights.
#include "tests/ranks/sharding/stack.h"
#include "tests/support/tolerances.h"

namespace weft {
namespace {

using testing::difference;
using testing::Method;
using testing::on_threads;
using testing::StackSetting;
using testing::Trace;
using testing::train_stack;


struct Dial {
  int zero;
  bool reshard;
  int ranks;
  int64_t micro_steps;
  bool every;  // reduce every micro-step
  Method method;
};

std::string dial_name(const ::testing::TestParamInfo<Dial>& info) {
  const Dial& d = info.param;
  const char* methods[] = {"adamw", "sgd", "torch_adamw", "own"};
  return "zero" + std::to_string(d.zero) + (d.reshard ? "" : "_keep") + "_" + std::to_string(d.ranks) + "ranks_" +
         std::to_string(d.micro_steps) + (d.every ? "reduced" : "micro") + "_" + methods[static_cast<int>(d.method)];
}

class ShardingParity : public ::testing::TestWithParam<Dial> {};

TEST_P(ShardingParity, EqualsOneRank) {
  const Dial d = GetParam();
  StackSetting setting{.method = d.method, .micro_steps = d.micro_steps};
  const Trace reference = train_stack(Comm(), setting);
  setting.options.sharding = sharding_of_zero(d.zero);
  setting.options.reshard_after_forward = d.reshard;
  setting.options.bucket = {.bytes = 1200, .last_bytes = 200};
  setting.reduce_every_micro_step = d.every;
  on_threads(d.ranks, [&](World& world) {
    const Trace trace = train_stack(world.comm(), setting);
    ASSERT_EQ(trace.gradients.size(), reference.gradients.size());
    EXPECT_LE(difference(trace, reference), testing::kFp64Parity);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Dials, ShardingParity,
    ::testing::Values(Dial{1, true, 2, 1, false, Method::weft_adamw}, Dial{1, true, 3, 4, false, Method::torch_adamw},
                      Dial{1, true, 4, 2, true, Method::own}, Dial{2, true, 2, 4, false, Method::weft_sgd},
                      Dial{2, true, 3, 1, false, Method::own}, Dial{2, true, 4, 3, true, Method::weft_adamw},
                      Dial{3, true, 2, 1, false, Method::weft_adamw}, Dial{3, true, 3, 4, false, Method::torch_adamw},
                      Dial{3, true, 4, 2, true, Method::own}, Dial{3, false, 2, 4, true, Method::weft_sgd},
                      Dial{3, false, 3, 1, false, Method::weft_adamw}, Dial{3, true, 2, 4, false, Method::weft_sgd}),
    dial_name);

TEST(ShardingParity, ABranchThatSomeRanksDoNotTake) {
  // Against DDP, which does not care who uses what.
  for (const std::vector<bool>& take : {std::vector<bool>{true, false, true}, {false, true, true}, {false, false, false}}) {
    on_threads(3, [&](World& world) {
      const Trace reference = train_stack(world.comm(), {.take_branch = take});
      for (const int zero : {1, 2, 3}) {
        const Trace trace = train_stack(world.comm(), {.options = {.sharding = sharding_of_zero(zero)}, .take_branch = take});
        ASSERT_EQ(trace.losses.size(), reference.losses.size());
        for (size_t i = 0; i < trace.losses.size(); ++i) EXPECT_NEAR(trace.losses[i], reference.losses[i], testing::kFp64Parity * reference.losses[i]);
        for (size_t i = 0; i < trace.weights.size(); ++i)
          EXPECT_LE((trace.weights[i] - reference.weights[i]).abs().max().item<double>(), testing::kFp64Parity) << "zero " << zero << ", weight " << i;
      }
    });
  }
}

TEST(ShardingParity, OverlapPrefetchAndGloo) {
  StackSetting setting;
  const Trace reference = train_stack(Comm(), setting);
  for (const int zero : {1, 2, 3}) {
    setting.options.sharding = sharding_of_zero(zero);
    setting.options.overlap = zero != 3;
    setting.options.prefetch = zero == 3 ? 0 : 1;
    on_threads(2, [&](World& world) { EXPECT_LE(difference(train_stack(world.comm(), setting), reference), testing::kFp64Parity); },
               zero == 2 ? BackendKind::local : BackendKind::gloo);
  }
}

const testing::RankBody kProcess("sharded_stack", [](World& world, const std::string& zero) -> std::string {
  const Trace trace = train_stack(world.comm(), {.options = {.sharding = sharding_of_zero(std::stoi(zero))}});
  return std::to_string(difference(trace, train_stack(Comm(), {})) <= testing::kFp64Parity);
});

TEST(ShardingParity, Processes) {
  for (const char* zero : {"1", "3"}) {
    for (const auto& rank : testing::on_processes(3, "sharded_stack", zero)) {
      EXPECT_EQ(rank.exit_code, 0) << rank.result;
      EXPECT_EQ(rank.result, "1");
    }
  }
}

}  // namespace
}  // namespace weft
