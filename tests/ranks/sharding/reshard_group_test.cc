// reshard_after_forward = a number of ranks: between forward and backward these hold one copy of a Unit between them.
#include <nlohmann/json.hpp>
#include <torch/nn/modules/container/sequential.h>

#include "tests/ranks/sharding/stack.h"
#include "tests/support/tolerances.h"
#include "weft/core/error.h"
#include "weft/memory/cpu_allocator.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using testing::difference;
using testing::on_threads;
using testing::StackSetting;
using testing::Trace;
using testing::train_stack;


StackSetting grouped(int64_t group, int64_t dp_shard = 0) {
  return {.options = {.sharding = Sharding::parameters, .dp_shard = dp_shard, .reshard_after_forward = group}};
}

TEST(ReshardGroup, EqualsOneRank) {
  const Trace reference = train_stack(Comm(), {});
  struct Case {
    int ranks;
    int64_t group, dp_shard, micro_steps, prefetch;
  };
  for (const Case& c : {Case{4, 2, 0, 1, 1}, Case{4, 2, 0, 3, 0}, Case{6, 3, 0, 1, 2}, Case{6, 2, 0, 2, 1}, Case{8, 2, 4, 1, 1}}) {
    StackSetting setting = grouped(c.group, c.dp_shard);
    setting.micro_steps = c.micro_steps;
    setting.reduce_every_micro_step = c.micro_steps > 1;
    setting.options.prefetch = c.prefetch;
    on_threads(c.ranks, [&](World& world) { EXPECT_LE(difference(train_stack(world.comm(), setting), reference), testing::kFp64Parity) << c.ranks << " ranks"; });
  }
  on_threads(4, [&](World& world) { EXPECT_LE(difference(train_stack(world.comm(), grouped(2)), reference), testing::kFp64Parity); }, BackendKind::gloo);
}

TEST(ReshardGroup, ABranchThatSomeRanksDoNotTake) {
  for (const std::vector<bool>& take : {std::vector<bool>{true, false, true, true}, {false, false, true, false}}) {
    on_threads(4, [&](World& world) {
      const Trace reference = train_stack(world.comm(), {.take_branch = take});
      StackSetting setting = grouped(2);
      setting.take_branch = take;
      const Trace trace = train_stack(world.comm(), setting);
      ASSERT_EQ(trace.weights.size(), reference.weights.size());
      EXPECT_LT(reference.losses.back(), 0.9 * reference.losses.front());
      for (size_t i = 0; i < trace.losses.size(); ++i) EXPECT_NEAR(trace.losses[i], reference.losses[i], testing::kFp64Parity * reference.losses[i]);
      for (size_t i = 0; i < trace.weights.size(); ++i)
        EXPECT_LE((trace.weights[i] - reference.weights[i]).abs().max().item<double>(), testing::kFp64Parity) << "weight " << i;
    });
  }
}

TEST(ReshardGroup, RefusesWhatDoesNotDivideWithTheLegalValues) {
  const auto text = [](World& world, Reshard reshard, int64_t dp_shard = 0) -> std::string {
    testing::Stack net = testing::make_stack();
    try {
      DataParallel dp(net, world.comm(), {.sharding = Sharding::parameters, .dp_shard = dp_shard, .reshard_after_forward = reshard});
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "no error";
  };
  on_threads(4, [&](World& world) {
    EXPECT_THAT(text(world, 3), HasSubstr("reshard_after_forward: 3 ranks cannot hold one copy between them where 4 share the parameters out "
                                          "(legal values: 2, or true or false)"));
    for (const int64_t group : {-2, 0, 1, 4, 8}) EXPECT_THAT(text(world, group), HasSubstr("legal values: 2")) << group;
    EXPECT_THAT(text(world, 2, 2), HasSubstr("use true or false")) << "replicas of two ranks";
    EXPECT_THAT(text(world, world.rank() == 1 ? Reshard(2) : Reshard(true)), HasSubstr("ranks wrapped different options"));
  });
  on_threads(3, [&](World& world) { EXPECT_THAT(text(world, 2), HasSubstr("use true or false")) << "3 is prime"; });
}

/// Two Units whose parameters need no padding on four ranks.
torch::nn::Sequential two_units() { return torch::nn::Sequential(Unit<torch::nn::Linear>(64, 128), Unit<torch::nn::Linear>(128, 128)); }
constexpr int64_t kParameters = 64 * 128 + 128 + 128 * 128 + 128;

// Gathers of the forward over all ranks, those of the backward within the group, and the reduce-scatter over all.
TEST(ReshardGroupTraffic, FollowsTheFormula) {
  constexpr int64_t kRanks = 4, kGroup = 2, kBytes = 4 * kParameters;
  constexpr int64_t kFlags = 64;  // one flag per parameter and one for failure, 4 bytes each
  on_threads(kRanks, [&](World& world) {
    torch::nn::Sequential net = two_units();
    DataParallel dp(net, world.comm(), {.sharding = Sharding::parameters, .reshard_after_forward = kGroup});
    const int64_t before = testing::sent_bytes(dp);
    net->forward(torch::ones({2, 64})).square().sum().backward();
    EXPECT_NEAR(testing::sent_bytes(dp) - before, 2 * (kRanks - 1) * kBytes / kRanks + (kGroup - 1) * kBytes / kGroup, kFlags);
  });
}

/// Bytes of parameters at rest, between forward and backward, and after backward.
std::string measure(World& world, const std::string& group) {
  install_cpu_allocator();
  torch::nn::Sequential net = two_units();
  DataParallelOptions options{.sharding = Sharding::parameters};
  if (group != "true") options.reshard_after_forward = std::stoi(group);
  DataParallel dp(net, world.comm(), options);
  nlohmann::json bytes;
  const auto measure = [&] { bytes.push_back(memory::usage().of(memory::Category::parameters)); };
  measure();
  const at::Tensor loss = net->forward(torch::ones({2, 64})).square().sum();
  measure();
  loss.backward();
  measure();
  return bytes.dump();
}
const testing::RankBody kMeasure("reshard_group_memory", measure);

TEST(ReshardGroupMemory, HoldsAPartOfTheCopyUntilBackward) {
  constexpr int64_t kRanks = 4;
  for (const auto& [group, held] : {std::pair{"true", int64_t{0}}, {"2", 4 * kParameters / 2}}) {
    for (const auto& rank : testing::on_processes(kRanks, "reshard_group_memory", group)) {
      ASSERT_EQ(rank.exit_code, 0) << rank.result;
      const auto bytes = nlohmann::json::parse(rank.result).get<std::vector<int64_t>>();
      constexpr int64_t kShard = 4 * kParameters / kRanks;
      EXPECT_EQ(bytes, (std::vector<int64_t>{kShard, kShard + held, kShard})) << group;
    }
  }
}

}  // namespace
}  // namespace weft
