// Recompute, activations on the host and gradients inside the loss, at every position of the dial: pairs of settings.
#include "tests/ranks/sharding/recompute.h"

namespace weft {
namespace {

using testing::kModes;
using testing::PatchworkSetting;
using testing::Trace;
using testing::train_patchwork;

TEST(RecomputeParity, PairsOfSettingsEqualOneRankWithout) {
  testing::expect_recompute_parity(testing::pairwise(testing::recompute_sizes()));
}

TEST(RecomputeParity, Fp32Losses) { testing::expect_recompute_parity({{1, 3, 0, 0}, {2, 1, 1, 1}, {4, 5, 0, 1}}, at::kFloat); }

// On one rank not even a bit changes. Case 27.
TEST(RecomputeParity, OneRankKeepsItsBits) {
  for (const bool force : {false, true}) {
    const Trace plain = train_patchwork(Comm(), {.force = force, .dtype = at::kFloat});
    EXPECT_NE(plain.losses.front(), plain.losses.back());
    for (const testing::Mode& mode : kModes) {
      const Trace trace = train_patchwork(Comm(), {.mode = mode, .force = force, .dtype = at::kFloat});
      EXPECT_EQ(trace.losses, plain.losses) << mode.name;
      for (size_t i = 0; i < plain.gradients.size(); ++i) EXPECT_TRUE(at::equal(trace.gradients[i], plain.gradients[i])) << mode.name << ", gradient " << i;
      for (size_t i = 0; i < plain.weights.size(); ++i) EXPECT_TRUE(at::equal(trace.weights[i], plain.weights[i])) << mode.name << ", weight " << i;
    }
  }
}

// A second forward uses what backward has gathered.
TEST(RecomputeTraffic, IsThatOfARunWithout) {
  for (const bool reshard : {true, false}) {
    testing::on_threads(3, [&](World& world) {
      const auto gathered = [&](const testing::Mode& mode) {
        testing::Stack net = testing::make_stack();
        DataParallel dp(net, world.comm(), {.sharding = Sharding::parameters, .reshard_after_forward = reshard});
        if (mode.recompute != Recompute::none) set_recompute(net, {.mode = mode.recompute});
        const auto before = dp.traffic();
        scale_loss(net(torch::ones({2, 6}, torch::kDouble)).sum(), 6, dp).backward();
        std::map<std::string, int64_t> bytes;
        for (const auto& [op, count] : dp.traffic()) bytes[op] = count.bytes - (before.count(op) > 0 ? before.at(op).bytes : 0);
        return bytes;
      };
      const auto plain = gathered(kModes[0]);
      EXPECT_GT(plain.at("all_gather"), 0);
      EXPECT_EQ(gathered(kModes[1]), plain);
    });
  }
}

}  // namespace
}  // namespace weft
