// Known faults of distributed training (docs/cases.md) at zero = 1, 2, 3: norms and clipping, tied parameters, sizes that do
// not divide, precision and optimizers. The right values are computed by hand.
#include <cmath>
#include <limits>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/normalization.h>
#include <torch/serialize.h>

#include "tests/ranks/sharding/factors.h"
#include "weft/core/error.h"

namespace weft {
namespace {

using testing::on_threads;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class Cases : public ::testing::TestWithParam<int> {
 protected:
  DataParallelOptions options() const { return {.sharding = sharding_of_zero(GetParam())}; }
};
INSTANTIATE_TEST_SUITE_P(Zero, Cases, ::testing::Values(1, 2, 3), [](const auto& info) { return "zero" + std::to_string(info.param); });

/// One parameter, used as it is.
struct VectorImpl : torch::nn::Module {
  explicit VectorImpl(at::IntArrayRef sizes, at::ScalarType dtype = at::kDouble) { w = register_parameter("w", torch::ones(sizes, dtype)); }
  at::Tensor forward() { return w * 1; }
  at::Tensor w;
};
TORCH_MODULE(Vector);

const at::Tensor& shard_of(const DataParallel& dp, const std::string& name) {
  for (const NamedTensor& s : dp.shards()) {
    if (s.name == name) return s.tensor;
  }
  throw std::runtime_error("no parameter " + name);
}

/// The whole value, on every rank.
at::Tensor value_of(DataParallel& dp, const at::Tensor& parameter) {
  const auto full = dp.gather_full();
  return parameter.detach().clone();
}

// Case 2: ranks with 4 and 1 valid tokens, gradient sums 8 and 6: 14 / 5, not the mean of means 4.
TEST_P(Cases, RanksWithUnequalCountsGiveTheGlobalMean) {
  on_threads(2, [&](World& world) {
    torch::nn::Sequential net(Unit<Vector>(at::IntArrayRef{70}));
    DataParallel dp(net, world.comm(), options());
    global_mean(net->forward().sum() * (world.rank() == 0 ? 8.0 : 6.0), world.rank() == 0 ? 4 : 1, dp).backward();
    const at::Tensor grad = shard_of(dp, "0.w").grad();
    EXPECT_GT(grad.numel(), 0);
    EXPECT_TRUE(torch::allclose(grad, torch::full_like(grad, 2.8)));
    // Case 3: rank 0 has none: the others' mean. Then nobody has: zero, and no NaN.
    for (const bool any : {true, false}) {
      dp.zero_grad();
      dp.continue_accumulation();
      const int64_t valid = any && world.rank() == 1 ? 3 : 0;
      global_mean(net->forward().sum() * static_cast<double>(valid), valid, dp).backward();
      EXPECT_TRUE(torch::allclose(shard_of(dp, "0.w").grad(), torch::full_like(grad, any ? 1.0 : 0.0)));
    }
  });
}

// Case 13: 3 lies in rank 0's shard, -4 in the last rank's. The norm is one number everywhere, whatever its type.
TEST_P(Cases, NormsOfShardsCombineByTheirType) {
  for (const int ranks : {2, 3, 4}) {
    on_threads(ranks, [&](World& world) {
      torch::nn::Sequential net(Unit<Vector>(at::IntArrayRef{128}));
      DataParallel dp(net, world.comm(), options());
      const auto backward = [&](double last) {
        dp.zero_grad();
        dp.continue_accumulation();
        const at::Tensor w = net->forward();
        (3 * w[0] + last * w[127]).backward();
      };
      backward(-4);
      EXPECT_DOUBLE_EQ(dp.grad_norm(), 5);
      EXPECT_DOUBLE_EQ(dp.grad_norm(1), 7);
      EXPECT_NEAR(dp.grad_norm(3), std::cbrt(27.0 + 64.0), 1e-14);
      EXPECT_DOUBLE_EQ(dp.grad_norm(kInfinity), 4);
      EXPECT_THROW(dp.grad_norm(0), ConfigError);
      EXPECT_THROW(dp.clip_grad_norm(-1), ConfigError);
      EXPECT_DOUBLE_EQ(dp.clip_grad_norm(10), 5) << "below the bound nothing is scaled";
      EXPECT_DOUBLE_EQ(dp.grad_norm(), 5);
      EXPECT_DOUBLE_EQ(dp.clip_grad_norm(2.5), 5);
      EXPECT_NEAR(dp.grad_norm(), 2.5, 1e-6) << "one factor for all shards";
      EXPECT_NEAR(dp.grad_norm(kInfinity), 2, 1e-6);
      // A NaN in one shard is everybody's, in a maximum too.
      backward(std::nan(""));
      EXPECT_TRUE(std::isnan(dp.grad_norm())) << "rank " << world.rank();
      EXPECT_TRUE(std::isnan(dp.grad_norm(kInfinity))) << "rank " << world.rank();
      backward(kInfinity);
      EXPECT_EQ(dp.grad_norm(), kInfinity);
    });
  }
}

// A norm above the largest number of the gradient's dtype, and one that its 8 bits cannot show.
TEST_P(Cases, NormsOf16BitGradientsAreNotRoundedTo16Bits) {
  on_threads(2, [&](World& world) {
    torch::nn::Sequential net(Unit<Vector>(at::IntArrayRef{10000}, at::kHalf));
    DataParallel dp(net, world.comm(), options());
    (net->forward() * 1024).sum().backward();
    EXPECT_NEAR(dp.grad_norm(), 102400, 1) << "fp16 ends at 65504";
  });
}

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    first = register_module("first", Unit<Vector>(at::IntArrayRef{2}));
    second = register_module("second", Unit<Vector>(at::IntArrayRef{2}));
    second->w = second->register_parameter("tied", first->w);
    other = register_module("other", Unit<Vector>(at::IntArrayRef{3}));
  }
  Unit<Vector> first{nullptr}, second{nullptr}, other{nullptr};
};
TORCH_MODULE(Tied);

// Case 11: embedding and head are one parameter, with the gradient [6, 8] in all. Its norm is 10, not 14.14, and an update
// moves both places.
TEST_P(Cases, ATiedParameterCountsOnce) {
  for (const int ranks : {2, 3}) {
    on_threads(ranks, [&](World& world) {
      Tied net;
      DataParallel dp(net, world.comm(), options());
      int64_t listed = 0;
      for (const NamedTensor& p : dp.parameters()) listed += p.tensor.is_same(net->first->w) ? 1 : 0;
      EXPECT_EQ(listed, 1);
      const at::Tensor a = torch::tensor({2.0, 3.0}, torch::kDouble), b = torch::tensor({4.0, 5.0}, torch::kDouble);
      ((net->first->forward() * a).sum() + (net->second->forward() * b).sum()).backward();
      EXPECT_DOUBLE_EQ(dp.grad_norm(), 10);
      optim::SGD optimizer(optim::param_groups<optim::SGDOptions>(dp, {{"*", optim::SGDOptions(0.5)}}), optim::SGDOptions(0.5));
      optimizer.step();
      dp.zero_grad();
      EXPECT_TRUE(torch::allclose(net->first->forward(), torch::tensor({-2.0, -3.0}, torch::kDouble)));
      EXPECT_TRUE(torch::allclose(net->second->forward(), torch::tensor({-2.0, -3.0}, torch::kDouble)));
    });
  }
}

struct OddImpl : torch::nn::Module {
  OddImpl() {
    for (const auto& [name, sizes] : std::vector<std::pair<const char*, std::vector<int64_t>>>{{"three", {3}}, {"one", {1}}, {"none", {0, 8}}, {"scalar", {}}})
      parts.push_back(register_module(name, Unit<Vector>(at::IntArrayRef(sizes))));
    outside = register_parameter("outside", torch::ones({1}, torch::kDouble));
  }
  at::Tensor forward() {
    at::Tensor sum = outside.sum();
    for (auto& part : parts) sum = sum + part->forward().sum();
    return sum;
  }
  std::vector<Unit<Vector>> parts;
  at::Tensor outside;
};
TORCH_MODULE(Odd);

// Case 21: parameters smaller than the group, also with no element at all: training, norms, largest value, whole values.
TEST_P(Cases, ParametersSmallerThanTheGroup) {
  for (const int ranks : {2, 3, 4}) {
    on_threads(ranks, [&](World& world) {
      Odd net;
      DataParallel dp(net, world.comm(), options());
      const auto optimizer = testing::make_method(testing::Method::torch_adamw, dp);
      const double mean = (world.size() + 1) / 2.0;
      for (int step = 0; step < 2; ++step) {
        (net() * (world.rank() + 1.0)).backward();
        EXPECT_NEAR(dp.grad_norm(), mean * std::sqrt(6.0), 1e-12);
        EXPECT_DOUBLE_EQ(dp.grad_norm(kInfinity), mean);
        dp.step(*optimizer);
        dp.zero_grad();
      }
      const auto full = dp.gather_full();
      for (const at::Tensor& p : net->parameters()) {
        EXPECT_TRUE((p < 1).all().item<bool>()) << "not updated";
        if (p.numel() == 0) continue;
        EXPECT_DOUBLE_EQ(p.amax().item<double>(), net->outside.item<double>()) << "elements of one gradient move alike";
      }
      EXPECT_EQ(net->parts[2]->w.sizes(), at::IntArrayRef({0, 8}));
    });
  }
}

// Case 31: 100 updates of 6e-4, each below half a unit of bf16 at 1: the master is 0.94, its bf16 value 0.94140625.
TEST_P(Cases, SmallUpdatesOfABf16WeightAreNotLost) {
  on_threads(3, [&](World& world) {
    torch::nn::Sequential net(Unit<Vector>(at::IntArrayRef{100}, at::kBFloat16));
    const at::Tensor w = net->parameters()[0];
    DataParallelOptions o = options();
    o.gradient_dtype = at::kFloat;
    DataParallel dp(net, world.comm(), o);
    optim::SGD optimizer(optim::param_groups<optim::SGDOptions>(dp, {{"*", optim::SGDOptions(6e-4)}}), optim::SGDOptions(6e-4));
    for (int step = 0; step < 100; ++step) {
      net->forward().sum().backward();
      optimizer.step();
      dp.zero_grad();
    }
    EXPECT_TRUE(at::equal(value_of(dp, w), torch::full({100}, 0.94140625, at::kBFloat16)));
  });
}

// Case 32: an infinity in one rank's shard: everybody skips and halves the scale.
TEST_P(Cases, AnOverflowInOneShardIsEverybodys) {
  on_threads(3, [&](World& world) {
    torch::nn::Sequential net(Unit<Vector>(at::IntArrayRef{96}, at::kHalf));
    const at::Tensor w = net->parameters()[0];
    DataParallelOptions o = options();
    o.gradient_dtype = at::kFloat;
    DataParallel dp(net, world.comm(), o);
    optim::SGD optimizer(optim::param_groups<optim::SGDOptions>(dp, {{"*", optim::SGDOptions(0.25)}}), optim::SGDOptions(0.25));
    optim::LossScaler scaler({.initial = 2});
    for (const bool overflow : {true, false}) {
      at::Tensor factor = torch::ones({96}, torch::kFloat);
      if (overflow && world.rank() == 1) factor[0] = kInfinity;  // lands in rank 0's shard alone
      scaler.scale((net->forward() * factor).sum()).backward();
      EXPECT_EQ(scaler.unscale(dp), !overflow);
      EXPECT_EQ(scaler.scale(), 1);
      if (!overflow) optimizer.step();
      dp.zero_grad();
      dp.continue_accumulation();
    }
    EXPECT_EQ(scaler.skipped(), 1);
    EXPECT_TRUE(at::equal(value_of(dp, w), torch::full({96}, 0.75, at::kHalf)));
  });
}

// Case 33: 1 and 256 times 2^-9 is 1.5, where a bf16 accumulator stays at 1: full gradients that wait, shards that accumulate,
// and the sum over ranks. Beside it, a parameter whose only gradient comes in the last micro-step.
TEST_P(Cases, GradientsOfBf16ParametersAccumulateInFp32) {
  for (const bool reduce_every : {false, true}) {
    on_threads(2, [&](World& world) {
      torch::nn::Sequential net(Unit<Vector>(at::IntArrayRef{70}, at::kBFloat16)), late(Unit<Vector>(at::IntArrayRef{5}, at::kBFloat16));
      torch::nn::ModuleList both(net, late);
      DataParallelOptions o = options();
      o.gradient_dtype = at::kFloat;
      o.grad_scale = GradScale::sum;
      DataParallel dp(both, world.comm(), o);
      for (int k = 0; k <= 128; ++k) {
        dp.sync(reduce_every || k == 128);
        if (k > 0) dp.continue_accumulation();
        const double factor = k == 0 ? (world.rank() == 0 ? 1.0 : 0.0) : 0x1p-9;
        at::Tensor loss = (net->forward() * factor).sum();
        if (k == 128) loss = loss + late->forward().sum();
        loss.backward();
      }
      const at::Tensor grad = shard_of(dp, "0.0.w").grad(), last = shard_of(dp, "1.0.w").grad();
      EXPECT_EQ(grad.scalar_type(), at::kFloat);
      EXPECT_TRUE(at::equal(grad, torch::full_like(grad, 1.5))) << grad;
      EXPECT_TRUE(at::equal(last, torch::full_like(last, 2.0)));
    });
  }
}

// Case 34: zero gradients, rate 1, decay 0.1: matrices are multiplied by 0.9, norms and biases stay, though every shard is flat.
TEST_P(Cases, OnlyMatricesDecay) {
  on_threads(3, [&](World& world) {
    torch::nn::Sequential net(Unit<torch::nn::Linear>(7, 5), Unit<torch::nn::LayerNorm>(torch::nn::LayerNormOptions({5})),
                              torch::nn::Linear(5, 3));
    std::vector<at::Tensor> before;
    for (const at::Tensor& p : net->parameters()) before.push_back(p.detach().clone());
    for (at::Tensor& p : before) world.comm().broadcast(p, 0).wait();
    DataParallel dp(net, world.comm(), options());
    optim::AdamW optimizer(optim::decay_matrices_only(dp, optim::AdamWOptions(1.0).weight_decay(0.1)));
    (net->forward(torch::ones({2, 7})) * 0).sum().backward();
    optimizer.step();
    const auto full = dp.gather_full();
    const auto after = net->parameters();
    for (size_t i = 0; i < after.size(); ++i) {
      const double factor = before[i].dim() > 1 ? 0.9 : 1.0;
      EXPECT_TRUE(torch::allclose(after[i], before[i] * factor, 1e-6, 0)) << i;
    }
  });
}

// Case 35: the same bits with and without overlap, with any bucket size and prefetch, and in two runs.
TEST_P(Cases, OverlapBucketsAndPrefetchDoNotChangeBits) {
  std::vector<DataParallelOptions> variants(6, options());
  variants[1].overlap = false;
  variants[2].bucket = {.bytes = 64, .last_bytes = 8};
  variants[3].bucket = {.bytes = 1 << 30, .last_bytes = 1 << 30};
  variants[4].prefetch = 0;
  variants[5].prefetch = 4;
  on_threads(3, [&](World& world) {
    testing::StackSetting setting{.options = options(), .micro_steps = 2, .steps = 6, .dtype = at::kFloat, .clip = 1e9};
    const testing::Trace first = testing::train_stack(world.comm(), setting);
    EXPECT_LT(first.losses.back(), first.losses.front());
    for (const DataParallelOptions& variant : variants) {
      setting.options = variant;
      const testing::Trace other = testing::train_stack(world.comm(), setting);
      EXPECT_EQ(other.losses, first.losses);
      for (size_t i = 0; i < first.weights.size(); ++i) EXPECT_TRUE(at::equal(other.weights[i], first.weights[i])) << i;
    }
  });
}

// Cases 36 and 37: a branch of some ranks is averaged with zeros; what no rank used keeps no gradient, does not decay, and has
// no moments. Setting gradients to None or to zero makes no difference.
TEST_P(Cases, WhatNobodyUsedIsLeftAlone) {
  for (const bool overlap : {true, false}) {
    on_threads(2, [&](World& world) {
      torch::nn::ModuleList net(Unit<Vector>(at::IntArrayRef{40}), Unit<Vector>(at::IntArrayRef{40}), Unit<Vector>(at::IntArrayRef{40}));
      DataParallelOptions o = options();
      o.overlap = overlap;
      DataParallel dp(net, world.comm(), o);
      std::vector<at::Tensor> shards;
      for (const NamedTensor& s : dp.shards()) shards.push_back(s.tensor);
      torch::optim::AdamW optimizer(shards, torch::optim::AdamWOptions(0.1).weight_decay(0.5));
      for (int step = 0; step < 3; ++step) {
        // Unit 0 on rank 0, Unit 1 on rank 1, Unit 2 nowhere.
        (net[static_cast<size_t>(world.rank())]->as<Unit<Vector>>()->forward() * (world.rank() + 1.0)).sum().backward();
        const at::Tensor first = shard_of(dp, "0.w").grad(), second = shard_of(dp, "1.w").grad();
        EXPECT_TRUE(torch::allclose(first, torch::full_like(first, 0.5)));
        EXPECT_TRUE(torch::allclose(second, torch::full_like(second, 1.0)));
        EXPECT_FALSE(shard_of(dp, "2.w").grad().defined());
        dp.step(optimizer);
        step % 2 == 0 ? optimizer.zero_grad() : dp.zero_grad();
      }
      EXPECT_EQ(optimizer.state().count(shard_of(dp, "2.w").unsafeGetTensorImpl()), 0U) << "moments of an unused parameter";
      EXPECT_TRUE(at::equal(value_of(dp, net[2]->as<Unit<Vector>>()->w), torch::ones({40}, torch::kDouble)));
      EXPECT_LT(value_of(dp, net[0]->as<Unit<Vector>>()->w).max().item<double>(), 1);
    });
  }
}

// Case 44: moments that are loaded before the first step continue an unbroken run, bit by bit.
TEST_P(Cases, OptimizerStateLoadedBeforeTheFirstStep) {
  for (const auto method : {testing::Method::weft_adamw, testing::Method::torch_adamw}) {
    on_threads(3, [&](World& world) {
      const auto run = [&](testing::Factors& net, DataParallel& dp, torch::optim::Optimizer& optimizer, int steps) {
        for (int step = 0; step < steps; ++step) {
          testing::factor_loss(net, world, dp).backward();
          dp.step(optimizer);
          dp.zero_grad();
        }
      };
      testing::Factors straight, broken, resumed;
      DataParallel dp_straight(straight, world.comm(), options()), dp_broken(broken, world.comm(), options());
      const auto whole = testing::make_method(method, dp_straight), first = testing::make_method(method, dp_broken);
      run(straight, dp_straight, *whole, 6);
      run(broken, dp_broken, *first, 3);
      std::stringstream file;
      torch::save(*first, file);
      DataParallel dp_resumed(resumed, world.comm(), options());
      {
        const auto from = dp_broken.gather_full(), to = dp_resumed.gather_full();
        const at::NoGradGuard no_grad;
        const auto source = broken->parameters(), target = resumed->parameters();
        for (size_t i = 0; i < source.size(); ++i) at::Tensor(target[i]).copy_(source[i]);
      }
      const auto second = testing::make_method(method, dp_resumed);
      torch::load(*second, file);
      run(resumed, dp_resumed, *second, 3);
      for (size_t i = 0; i < dp_straight.shards().size(); ++i) {
        EXPECT_TRUE(at::equal(dp_resumed.shards()[i].tensor, dp_straight.shards()[i].tensor)) << dp_straight.shards()[i].name;
      }
      EXPECT_FALSE(at::equal(value_of(dp_straight, straight->factors[0]->w), torch::full({testing::kElements}, 2.0, torch::kDouble)));
    });
  }
}

}  // namespace
}  // namespace weft
