// Optimizers that look at more than single elements, under tensor parallelism: one rank's numbers.
#include <gmock/gmock.h>

#include "tests/ranks/tensor/verify_models.h"
#include "tests/support/ranks.h"
#include "weft/comm/mesh.h"
#include "weft/core/error.h"
#include "weft/nn/placement.h"
#include "weft/optim/loss_scaler.h"
#include "weft/optim/muon.h"
#include "weft/optim/optim.h"
#include "weft/parallel/data_parallel.h"

namespace weft {
namespace {

VerifyReport verified(const testing::VerifyModel& model, const std::string& optimizer, const std::string& layouts) {
  testing::TempDir dir;
  testing::write_verify_tokens(dir / "tokens.bin");
  config::RunConfig config = testing::verify_config(model, dir / "tokens.bin");
  config.optimizer.name = optimizer;
  return train::verify(config, train::split_layouts(layouts), {.steps = 4});
}

TEST(TensorOptimizers, GiveOneRanksNumbers) {
  const auto& gpt2 = testing::kVerifyModels[0];   // biases, also of layers cut by columns; tied head
  const auto& tied = testing::kVerifyModels[2];   // the same without biases: a key's has a gradient of rounding alone, which others scale up
  const auto& qwen3 = testing::kVerifyModels[4];  // two key heads: copies on four ranks; norms of queries and keys
  for (const std::string optimizer : {"muon", "adafactor", "lion", "sgd"}) {
    const bool few = optimizer == "lion" || optimizer == "sgd";
    const VerifyReport a = verified(optimizer == "muon" ? gpt2 : tied, optimizer, few ? "tp=3" : "tp=3; dp=2,zero=1,tp=2; dp_shard=2,zero=3,tp=2,sequence_parallel=true");
    EXPECT_TRUE(a.ok()) << optimizer << "\n" << to_text(a);
    const VerifyReport b = verified(qwen3, optimizer, few ? "dp=2,tp=2" : "tp=4; dp=2,tp=2; dp=4,dp_shard=2,zero=2,tp=2");
    EXPECT_TRUE(b.ok()) << optimizer << "\n" << to_text(b);
  }
}

TEST(TensorOptimizers, BlocksOf8BitMomentsAreWholeOrRefusedByName) {
  // Every part of a row or column is a multiple of 256 elements.
  const testing::VerifyModel wide{"wide", "llama-tiny", 256, 8, 2, 64, 512};
  const VerifyReport whole = verified(wide, "adam8bit", "tp=2; dp=2,zero=2,tp=2");
  EXPECT_TRUE(whole.ok()) << to_text(whole);
  const testing::VerifyModel narrow{"narrow", "llama-tiny", 256, 4, 4, 32, 512};
  const VerifyReport cut = verified(narrow, "adam8bit", "tp=2; dp=2,zero=1,tp=2");
  EXPECT_THAT(cut.rows[0].first, ::testing::AllOf(::testing::HasSubstr("[256, 128]"), ::testing::HasSubstr("inside of a block of 256")));
  EXPECT_THAT(cut.rows[1].first, ::testing::AllOf(::testing::HasSubstr("'layers.0.attn.wo.weight'"), ::testing::HasSubstr("AdamW")));
}

/// bf16 weights without masters: the random bits belong to elements of the whole parameter.
TEST(TensorOptimizers, StochasticRoundingDependsOnTheGlobalElementAlone) {
  const std::vector<int64_t> shape{6, 10};
  const auto gradient = [](int64_t step) { return (at::arange(60, at::kFloat) * 0.37F + static_cast<float>(step)).sin().to(at::kBFloat16).view({6, 10}); };
  const at::Tensor start = at::linspace(-1, 1, 60, at::kFloat).to(at::kBFloat16).view({6, 10});
  const auto train = [&](const Comm& dp_ranks, const Comm& tp, int dim, Sharding sharding) {
    const auto part_of = [&](const at::Tensor& t) {
      const layout::Part part = layout::part_of(shape[static_cast<size_t>(dim)], tp.size(), tp.rank());
      return t.narrow(dim, part.begin, part.size).contiguous();
    };
    at::Tensor weight = part_of(start).clone().requires_grad_();
    const layout::Part part = layout::part_of(shape[static_cast<size_t>(dim)], tp.size(), tp.rank());
    if (tp.size() > 1) nn::set_placement(weight, {.comm = tp, .shape = shape, .dim = dim, .begin = part.begin});
    DataParallel dp({{"w", weight}}, {}, dp_ranks, {.sharding = sharding});
    optim::AdamW adamw(optim::decay_matrices_only(dp, optim::AdamWOptions(1e-3)));
    adamw.round_stochastically(7, dp.shards());
    for (int64_t step = 0; step < 3; ++step) {
      (weight * part_of(gradient(step))).sum().backward();
      adamw.step();
      dp.zero_grad();
    }
    const auto full = dp.gather_full();
    return nn::whole_tensor(weight.detach().to(at::kFloat), nn::placement_of(weight));
  };
  const at::Tensor expected = train(Comm(), Comm(), 0, Sharding::none);
  EXPECT_FALSE(at::equal(expected, start.to(at::kFloat)));
  testing::on_threads(4, [&](World& world) {
    const Mesh mesh(world, {{"dp", 2}, {"tp", 2}});
    for (const int dim : {0, 1}) {
      EXPECT_TRUE(at::equal(train(Comm(), world.comm(), dim, Sharding::none), expected)) << "4 tensor-parallel ranks, dim " << dim;
      for (const Sharding sharding : {Sharding::none, Sharding::optimizer}) {
        EXPECT_TRUE(at::equal(train(mesh["dp"], mesh["tp"], dim, sharding), expected)) << "dim " << dim;
      }
    }
  });
}

/// Known case 32, over tensor-parallel ranks.
TEST(TensorOptimizers, AnOverflowOfOneRankIsEverybodys) {
  testing::on_threads(2, [](World& world) {
    at::Tensor cut = at::ones({2}).requires_grad_();
    nn::set_placement(cut, {.comm = world.comm(), .shape = {4}, .dim = 0, .begin = 2 * world.rank()});
    DataParallel dp({{"cut", cut}}, {}, Comm(), {});
    optim::LossScaler scaler({.initial = 2});
    for (const bool overflow : {true, false}) {
      scaler.scale((cut * (overflow && world.rank() == 1 ? INFINITY : 1.0F)).sum()).backward();
      EXPECT_EQ(scaler.unscale(dp), !overflow) << "rank " << world.rank();
      EXPECT_EQ(scaler.scale(), 1);
      dp.zero_grad();
    }
  });
}

}  // namespace
}  // namespace weft
