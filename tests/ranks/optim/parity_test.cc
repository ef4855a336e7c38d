// Cells of optimizers x zero x dtype x ranks that show every pair; what optimizers say when shards do not suit them.
#include "tests/ranks/optim/parity.h"

#include "weft/core/error.h"
#include "weft/parallel/shard_owner.h"

namespace weft {
namespace {

using testing::on_threads;

TEST(OptimizerParity, EqualsOneRankInEveryPair) {
  for (const auto& cell : testing::pairwise(testing::optimizer_sizes())) {
    SCOPED_TRACE(testing::name_of({cell, 0}));
    testing::expect_optimizer_parity(cell);
  }
}

TEST(OptimizerParity, InReplicasOfShards) {
  for (const auto& kind : testing::optimizer_kinds()) {
    if (kind.granule == 1 && std::string(kind.name) != "adafactor" && std::string(kind.name) != "muon") continue;
    const testing::Trace& reference = testing::one_rank(kind, at::kDouble);
    on_threads(4, [&](World& world) {
      const testing::Trace trace = testing::train_layers(world.comm(), kind, at::kDouble, {.sharding = Sharding::parameters, .dp_shard = 2});
      EXPECT_LE(testing::difference(trace, reference), 1e-10) << kind.name;
    });
  }
}

TEST(ShardInfo, SaysWhichElementsOfWhichParameter) {
  for (const int zero : {1, 2, 3}) {
    on_threads(3, [&](World& world) {
      testing::Layers net = testing::make_layers();
      std::vector<at::Tensor> whole;
      for (const at::Tensor& p : net->parameters()) whole.push_back(p.detach().clone());
      const DataParallel dp(net, world.comm(), {.sharding = sharding_of_zero(zero), .granules = {{"*.weight", 256}}});
      for (size_t i = 0; i < whole.size(); ++i) {
        const NamedTensor& shard = dp.shards()[i];
        const ShardInfo* info = shard_info(shard.tensor);
        ASSERT_NE(info, nullptr);
        EXPECT_EQ(info->name, shard.name);
        EXPECT_EQ(info->shape, whole[i].sizes().vec());
        EXPECT_EQ(info->ranks.size(), 3);
        EXPECT_EQ(info->end() - info->begin(), shard.tensor.numel());
        EXPECT_TRUE(at::equal(shard.tensor.detach(), whole[i].flatten().narrow(0, info->begin(), shard.tensor.numel()))) << shard.name;
        EXPECT_TRUE(info->begin() % 256 == 0 || info->begin() == info->numel() || shard.name.find("weight") == std::string::npos) << shard.name;
      }
      EXPECT_EQ(shard_info(whole[0]), nullptr);
    });
  }
}

TEST(Granules, ShardsThatCutBlocksAreRefusedByName) {
  const auto error_of = [](const std::function<void()>& act) -> std::string {
    try {
      act();
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "no error";
  };
  on_threads(2, [&](World& world) {
    testing::Layers net = testing::make_layers();
    const DataParallel dp(net, world.comm(), {.sharding = Sharding::gradients});
    const std::string error = error_of([&] { optim::Adam8bit(optim::decay_matrices_only(dp, optim::AdamWOptions(1e-3))); });
    EXPECT_NE(error.find("granules"), std::string::npos) << error;
    EXPECT_NE(error.find(".weight' is cut at element"), std::string::npos) << error;
    EXPECT_NE(error_of([&] { DataParallel(testing::make_layers(), world.comm(), {.granules = {{"*", 0}}}); }).find("at least 1"), std::string::npos);
  });
}

}  // namespace
}  // namespace weft
