// Modules built under weft::deferred and then sharded: one rank's values, and never the whole model.
#include <nlohmann/json.hpp>
#include <torch/nn/modules/container/sequential.h>

#include "tests/ranks/sharding/stack.h"
#include "tests/support/tolerances.h"
#include "weft/core/error.h"
#include "weft/memory/cpu_allocator.h"
#include "weft/nn/deferred.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using testing::on_threads;

testing::Stack deferred_stack(uint64_t seed = 5) {
  return deferred([] { return testing::Stack(); }, {.seed = seed});
}

TEST(DeferredSharding, EveryRankCountAndPositionStartsFromTheSameValues) {
  testing::Stack alone = deferred_stack();
  materialise(alone);
  EXPECT_GT(alone->a->up->weight.norm().item<double>(), 0.1);
  EXPECT_FALSE(at::equal(alone->a->up->weight, alone->b->up->weight));
  for (const int ranks : {1, 2, 3}) {
    for (const int zero : {0, 1, 2, 3}) {
      on_threads(ranks, [&](World& world) {
        testing::Stack net = deferred_stack();
        DataParallel dp(net, world.comm(), {.sharding = sharding_of_zero(zero)});
        {
          const auto full = dp.gather_full();
          for (const auto& item : net->named_parameters())
            EXPECT_TRUE(at::equal(item.value(), alone->named_parameters()[item.key()])) << item.key() << " zero " << zero << ", " << ranks << " ranks";
        }
        net(torch::ones({2, 6}, torch::kDouble)).square().sum().backward();
        EXPECT_GT(dp.grad_norm(), 0);
      });
    }
  }
  on_threads(4, [&](World& world) {
    testing::Stack net = deferred_stack();
    DataParallel dp(net, world.comm(), {.sharding = Sharding::parameters, .dp_shard = 2});
    const auto full = dp.gather_full();
    for (const auto& item : net->named_parameters()) EXPECT_TRUE(at::equal(item.value(), alone->named_parameters()[item.key()])) << item.key();
  });
}

/// Losses of a few steps over the same global batch.
std::vector<double> losses(const Comm& comm, DataParallelOptions options) {
  testing::Stack net = deferred_stack();
  DataParallel dp(net, comm, std::move(options));
  const auto optimizer = testing::make_method(testing::Method::weft_adamw, dp);
  const at::Tensor x = torch::linspace(-1, 1, 12 * 6, torch::kDouble).view({12, 6}), y = torch::sin(x.narrow(1, 0, 3) * 2);
  const int64_t rows = 12 / comm.size();
  std::vector<double> list;
  for (int step = 0; step < 6; ++step) {
    const at::Tensor sum = (net(x.narrow(0, comm.rank() * rows, rows)) - y.narrow(0, comm.rank() * rows, rows)).square().sum();
    scale_loss(sum, 12, dp).backward();
    at::Tensor total = sum.detach().clone();
    comm.all_reduce(total).wait();
    list.push_back(total.item<double>());
    dp.step(*optimizer);
    dp.zero_grad();
  }
  return list;
}

TEST(DeferredSharding, TrainsAsOneRankDoes) {
  const std::vector<double> reference = losses(Comm(), {});
  EXPECT_LT(reference.back(), 0.9 * reference.front());
  for (const int zero : {1, 3}) {
    on_threads(3, [&](World& world) {
      const std::vector<double> list = losses(world.comm(), {.sharding = sharding_of_zero(zero)});
      for (size_t i = 0; i < list.size(); ++i) EXPECT_NEAR(list[i], reference[i], testing::kFp64Parity * reference[i]) << "zero " << zero;
    });
  }
}

TEST(DeferredSharding, RanksThatWouldStartDifferentlyAreRefused) {
  on_threads(2, [](World& world) {
    const auto refused = [&](testing::Stack net) -> std::string {
      try {
        DataParallel dp(net, world.comm(), {.sharding = Sharding::parameters});
      } catch (const ConfigError& error) {
        return error.what();
      }
      return "no error";
    };
    EXPECT_THAT(refused(deferred_stack(world.rank() == 0 ? 5 : 6)), HasSubstr("ranks wrapped different models"));
    EXPECT_THAT(refused(world.rank() == 0 ? deferred_stack() : testing::make_stack()), HasSubstr("ranks wrapped different models"));
  });
}

constexpr int64_t kLayers = 8, kSize = 256, kUnit = 4 * kSize * kSize;  // bytes of a Unit, without padding

torch::nn::Sequential layers() {
  torch::nn::Sequential net;
  for (int64_t i = 0; i < kLayers; ++i) net->push_back(Unit<torch::nn::Linear>(torch::nn::LinearOptions(kSize, kSize).bias(false)));
  return net;
}

/// Peaks of construction by category, and what is live after it.
std::string measure(World& world, const std::string& how) {
  install_cpu_allocator();
  memory::reset_peak();
  torch::nn::Sequential net = how == "deferred" ? deferred([] { return layers(); }) : layers();
  DataParallel dp(net, world.comm(), {.sharding = Sharding::parameters});
  const memory::Usage usage = memory::usage();
  net->forward(torch::ones({2, kSize})).square().sum().backward();
  EXPECT_GT(dp.grad_norm(), 0);
  return nlohmann::json{{"peak", usage.peak},
                        {"parameters", usage.peak_by(memory::Category::parameters)},
                        {"live", usage.live},
                        {"live_parameters", usage.of(memory::Category::parameters)}}
      .dump();
}
const testing::RankBody kMeasure("deferred_memory", measure);

TEST(DeferredMemory, PeakIsTheShardsPlusOneUnit) {
  constexpr int64_t kSlack = 64 << 10;  // messages of the checks at construction
  for (const int ranks : {2, 4}) {
    const auto shards = kLayers * kUnit / ranks;
    for (const auto& rank : testing::on_processes(ranks, "deferred_memory", "deferred")) {
      ASSERT_EQ(rank.exit_code, 0) << rank.result;
      const auto bytes = nlohmann::json::parse(rank.result);
      EXPECT_EQ(bytes["live_parameters"], shards);
      EXPECT_LE(bytes["parameters"].get<int64_t>(), shards + kUnit);
      // With what stays: gradient shards and pooled buffers.
      EXPECT_LE(bytes["peak"].get<int64_t>(), bytes["live"].get<int64_t>() + kUnit + kSlack);
      EXPECT_LT(bytes["live"].get<int64_t>(), 2 * shards + 4 * kUnit);
    }
  }
  // What the bound would miss otherwise: a module that is built whole.
  for (const auto& rank : testing::on_processes(4, "deferred_memory", "whole")) {
    ASSERT_EQ(rank.exit_code, 0) << rank.result;
    EXPECT_GT(nlohmann::json::parse(rank.result)["peak"].get<int64_t>(), kLayers * kUnit);
  }
}

}  // namespace
}  // namespace weft
