// Mixed precision under data parallelism: the loss scaler's agreed decision, and autocast for modules that are not ours.
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>
#include <limits>
#include <mutex>
#include <optional>
#include <sstream>

#include "tests/support/ranks.h"
#include "weft/core/error.h"
#include "weft/optim/autocast.h"
#include "weft/optim/loss_scaler.h"
#include "weft/optim/optim.h"

namespace weft {
namespace {

using optim::Autocast;
using optim::LossScaler;
using ::testing::HasSubstr;
using ::weft::testing::on_threads;

std::string saved(const LossScaler& scaler) {
  torch::serialize::OutputArchive archive;
  scaler.save(archive);
  std::ostringstream out;
  archive.save_to(out);
  return out.str();
}

LossScaler restored(const std::string& text) {
  std::istringstream in(text);
  torch::serialize::InputArchive archive;
  archive.load_from(in);
  LossScaler scaler;
  scaler.load(archive);
  return scaler;
}

/// One parameter; its gradient on each rank is `factor`.
struct OneWeight {
  explicit OneWeight(const Comm& comm)
      : weight(torch::ones({5}).requires_grad_()),
        dp({{"w", weight}}, {}, comm, {.grad_scale = GradScale::sum}),
        optimizer({optim::OptimizerParamGroup({weight})}, optim::SGDOptions(1.0)) {}

  bool step(LossScaler& scaler, double factor) {
    scaler.scale((weight * factor).sum()).backward();
    const bool updated = scaler.unscale(dp);
    if (updated) optimizer.step();
    optimizer.zero_grad();
    return updated;
  }
  float value() const { return weight[4].item<float>(); }

  at::Tensor weight;
  DataParallel dp;
  optim::SGD optimizer;
};

constexpr double kInf = std::numeric_limits<double>::infinity();

// Fault class "fp16 overflow on one rank only": all skip and halve the scale; nothing advances.
TEST(LossScalerTest, AnOverflowOnOneRankIsEverybodys) {
  for (const int ranks : {1, 2, 3}) {
    for (const double bad : {kInf, std::nan("")}) {
      on_threads(ranks, [&](World& world) {
        OneWeight net(world.comm());
        LossScaler scaler({.initial = 2, .growth_interval = 2});
        const int culprit = ranks - 1;
        EXPECT_FALSE(net.step(scaler, world.rank() == culprit ? bad : 0.25));
        EXPECT_EQ(scaler.scale(), 1.0);
        EXPECT_EQ(scaler.skipped(), 1);
        EXPECT_EQ(net.value(), 1.0F) << "no rank has updated";
        EXPECT_TRUE(net.step(scaler, 0.25));
        EXPECT_EQ(net.value(), 1.0F - 0.25F * static_cast<float>(ranks)) << "the sum over the ranks, unscaled";
        EXPECT_EQ(scaler.scale(), 1.0);
        EXPECT_TRUE(net.step(scaler, 0.25));
        EXPECT_EQ(scaler.scale(), 2.0) << "grown after two steps without overflow";
        EXPECT_EQ(scaler.skipped(), 1);
      });
    }
  }
}

TEST(LossScalerTest, StateSurvivesSaving) {
  on_threads(2, [&](World& world) {
    OneWeight net(world.comm());
    LossScaler scaler({.initial = 8, .growth_interval = 3});
    net.step(scaler, kInf);
    net.step(scaler, 0.5);
    net.step(scaler, 0.5);
    LossScaler again({.growth_interval = 3});
    EXPECT_EQ(restored(saved(scaler)).scale(), 4.0);
    EXPECT_EQ(restored(saved(scaler)).skipped(), 1);
    std::istringstream in(saved(scaler));
    torch::serialize::InputArchive archive;
    archive.load_from(in);
    again.load(archive);
    net.step(again, 0.5);
    EXPECT_EQ(again.scale(), 8.0) << "the third step in a row, counted over the save";
  });
}

TEST(LossScalerTest, OverflowAtTheSmallestScaleIsAnErrorOnAllRanks) {
  on_threads(2, [&](World& world) {
    OneWeight net(world.comm());
    LossScaler scaler({.initial = 2});
    net.step(scaler, world.rank() == 0 ? kInf : 1.0);
    try {
      net.step(scaler, world.rank() == 0 ? kInf : 1.0);
      ADD_FAILURE() << "no error";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr("even with a loss scale of 1"));
    }
  });
  EXPECT_THROW(LossScaler({.backoff = 1.5}), ConfigError);
}

/// Gradients of half a thousandth of fp16's smallest number vanish without scaling, and are exact with it.
TEST(LossScalerTest, SmallFp16GradientsSurvive) {
  const double tiny = std::ldexp(1.0, -33);  // fp16's smallest positive number is 2^-24
  for (const bool scaled : {false, true}) {
    at::Tensor weight = torch::ones({2}, torch::kHalf).requires_grad_();
    DataParallel dp({{"w", weight}}, {}, Comm(), {.grad_scale = GradScale::sum, .gradient_dtype = at::kFloat});
    LossScaler scaler({.initial = scaled ? 65536.0 : 1.0});
    scaler.scale(weight.to(at::kFloat).sum() * tiny).backward();
    ASSERT_TRUE(scaler.unscale(dp));
    EXPECT_EQ(weight.grad()[0].item<double>(), scaled ? tiny : 0.0);
  }
}

struct Net : torch::nn::Module {
  Net() : first(register_module("first", torch::nn::Linear(8, 32))), second(register_module("second", torch::nn::Linear(32, 4))) {}
  at::Tensor forward(const at::Tensor& x) { return second(torch::relu(first(x))); }
  torch::nn::Linear first, second;
};

/// Losses of 20 steps over a batch of 12 cut over the ranks.
std::vector<double> losses(World& world, bool autocast, std::vector<at::ScalarType>& seen) {
  static std::mutex mutex;  // ranks are threads, and the default generator is the process's
  std::shared_ptr<Net> net;
  at::Tensor x, y;
  {
    const std::lock_guard lock(mutex);
    torch::manual_seed(5);
    net = std::make_shared<Net>();
    x = torch::randn({12, 8});
    y = torch::randn({12, 4});
  }
  const auto mine = [&](const at::Tensor& t) { return t.chunk(world.size())[world.rank()]; };
  DataParallel dp(net, world.comm(), {.grad_scale = GradScale::sum});
  optim::AdamW optimizer({optim::OptimizerParamGroup(net->parameters())}, optim::AdamWOptions(1e-2));
  std::vector<double> result;
  for (int step = 0; step < 20; ++step) {
    at::Tensor loss, out;
    {
      std::optional<Autocast> scope;
      if (autocast) scope.emplace();
      out = net->forward(mine(x));
      loss = torch::mse_loss(out, mine(y), torch::Reduction::Sum) / (12 * 4);
    }
    loss.backward();
    optimizer.step();
    seen = {out.scalar_type(), loss.scalar_type(), net->first->weight.grad().scalar_type()};
    optimizer.zero_grad();
    const at::Tensor total = loss.detach().to(at::kDouble).reshape({1});
    world.comm().all_reduce(total).wait();
    result.push_back(total.item<double>());
  }
  return result;
}

TEST(AutocastTest, ForeignModulesTrainInBf16UnderDataParallelism) {
  std::vector<double> full;
  on_threads(1, [&](World& world) {
    std::vector<at::ScalarType> seen;
    full = losses(world, false, seen);
    EXPECT_EQ(seen[0], at::kFloat);
  });
  ASSERT_LT(full.back(), 0.8 * full.front()) << "the reference learns";
  for (const int ranks : {1, 2, 3}) {
    on_threads(ranks, [&](World& world) {
      std::vector<at::ScalarType> seen;
      const std::vector<double> low = losses(world, true, seen);
      EXPECT_EQ(seen, (std::vector{at::kBFloat16, at::kFloat, at::kFloat})) << "products in bf16, loss and gradients in fp32";
      bool differs = false;
      for (size_t i = 0; i < low.size(); ++i) {
        EXPECT_NEAR(low[i], full[i], 0.02 * full.front()) << "step " << i;  // bf16 keeps 8 bits: 0.4% a product
        differs |= low[i] != full[i];
      }
      EXPECT_TRUE(differs) << "nothing was cast";
      EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU)) << "the scope ends";
    });
  }
}

}  // namespace
}  // namespace weft
