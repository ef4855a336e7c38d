#include "weft/optim/optim.h"

#include <sstream>
#include <torch/serialize.h>

#include "tests/support/test_pch.h"
#include "weft/core/error.h"

namespace weft::optim {
namespace {

struct Case {
  at::ScalarType dtype;
  double tolerance;  // relative; fp32 differs by fused multiply-adds only
};

/// Parameters of awkward sizes: vector tails, a scalar, an empty one.
std::vector<at::Tensor> make_parameters(at::ScalarType dtype) {
  torch::manual_seed(3);
  std::vector<at::Tensor> list;
  for (const auto& shape : std::vector<std::vector<int64_t>>{{7, 5}, {1}, {}, {0, 8}, {40000}, {33}})
    list.push_back(torch::randn(shape, torch::dtype(dtype)).requires_grad_());
  return list;
}

void set_gradients(const std::vector<at::Tensor>& parameters, int step) {
  torch::manual_seed(100 + step);
  for (const at::Tensor& p : parameters) p.mutable_grad() = torch::randn_like(p).detach();
}

double largest_difference(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].numel() == 0) continue;
    worst = std::max(worst, ((a[i] - b[i]).abs().max() / b[i].abs().max()).item<double>());
  }
  return worst;
}

class OptimizerParity : public ::testing::TestWithParam<Case> {};

TEST_P(OptimizerParity, AdamWEqualsTorch) {
  const auto [dtype, tolerance] = GetParam();
  auto ours = make_parameters(dtype), theirs = make_parameters(dtype);
  const auto start = make_parameters(dtype);
  const auto options = AdamWOptions(1e-2).betas({0.9, 0.95}).weight_decay(0.1);
  AdamW a({OptimizerParamGroup(ours)}, options);
  torch::optim::AdamW b(theirs, options);
  for (int step = 0; step < 10; ++step) {
    set_gradients(ours, step);
    set_gradients(theirs, step);
    a.step();
    b.step();
  }
  EXPECT_LE(largest_difference(ours, theirs), tolerance);
  EXPECT_GT(largest_difference(ours, start), 1e-2);
}

TEST_P(OptimizerParity, SgdEqualsTorch) {
  const auto [dtype, tolerance] = GetParam();
  for (const bool nesterov : {false, true}) {
    auto ours = make_parameters(dtype), theirs = make_parameters(dtype);
    const auto options = SGDOptions(0.05).momentum(0.9).weight_decay(0.01).nesterov(nesterov);
    SGD a({OptimizerParamGroup(ours)}, options);
    torch::optim::SGD b(theirs, options);
    for (int step = 0; step < 5; ++step) {
      set_gradients(ours, step);
      set_gradients(theirs, step);
      a.step();
      b.step();
    }
    EXPECT_LE(largest_difference(ours, theirs), tolerance);
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, OptimizerParity, ::testing::Values(Case{at::kDouble, 1e-14}, Case{at::kFloat, 1e-5}));

TEST(AdamWTest, ResultOfAnElementDoesNotDependOnItsPosition) {
  const at::Tensor base = torch::randn({100}), grad = torch::randn({100});
  const auto run = [&](int64_t begin, int64_t n) {
    at::Tensor p = base.narrow(0, begin, n).clone().requires_grad_();
    AdamW optimizer({OptimizerParamGroup({p})}, AdamWOptions(1e-2));
    p.mutable_grad() = grad.narrow(0, begin, n).clone();
    optimizer.step();
    return p.detach();
  };
  const at::Tensor whole = run(0, 100);
  for (const auto& [begin, n] : std::vector<std::pair<int64_t, int64_t>>{{0, 1}, {3, 17}, {50, 50}, {97, 3}})
    EXPECT_TRUE(at::equal(run(begin, n), whole.narrow(0, begin, n)));
}

// Fault class "bf16 weights without a master copy stop moving": an update of 6e-4 is below half an ulp of 1.0.
TEST(MasterWeightsTest, SmallUpdatesOfABf16WeightAreNotLost) {
  at::Tensor p = torch::ones({4}, torch::dtype(at::kBFloat16)).requires_grad_();
  SGD optimizer({OptimizerParamGroup({p})}, SGDOptions(6e-4));
  for (int i = 0; i < 100; ++i) {
    p.mutable_grad() = torch::ones({4});
    optimizer.step();
  }
  EXPECT_EQ(p[0].item<float>(), 0.94140625F);
}

TEST(AdamWTest, Bf16ParameterIsTheRoundingOfAnFp32Run) {
  torch::manual_seed(1);
  const at::Tensor start = torch::randn({1000}).to(at::kBFloat16);
  at::Tensor low = start.clone().requires_grad_(), high = start.to(at::kFloat).requires_grad_();
  AdamW a({OptimizerParamGroup({low})}, AdamWOptions(1e-3)), b({OptimizerParamGroup({high})}, AdamWOptions(1e-3));
  for (int step = 0; step < 20; ++step) {
    const at::Tensor grad = torch::randn({1000}).to(at::kBFloat16);
    low.mutable_grad() = grad;
    high.mutable_grad() = grad.to(at::kFloat);
    a.step();
    b.step();
  }
  EXPECT_TRUE(at::equal(low.detach(), high.detach().to(at::kBFloat16)));
  EXPECT_FALSE(at::equal(low.detach(), start));
}

TEST(AdamWTest, ParametersWithoutGradientKeepValueAndMoments) {
  at::Tensor used = torch::ones({3}).requires_grad_(), unused = torch::ones({3}).requires_grad_();
  AdamW optimizer({OptimizerParamGroup({used, unused})}, AdamWOptions(1e-2).weight_decay(0.5));
  used.mutable_grad() = torch::ones({3});
  optimizer.step();
  EXPECT_TRUE(at::equal(unused.detach(), torch::ones({3})));
  EXPECT_FALSE(at::equal(used.detach(), torch::ones({3})));
  EXPECT_EQ(optimizer.state().size(), 1U);
}

// Fault class "weight decay groups": zero gradients, lr 1, decay 0.1, one step: matrices x 0.9, the rest unchanged.
TEST(DecayGroups, OnlyMatricesDecay) {
  std::vector<NamedTensor> parameters{{"w", torch::ones({2, 2}).requires_grad_()},
                                      {"norm", torch::ones({2}).requires_grad_()},
                                      {"bias", torch::ones({1}).requires_grad_()}};
  AdamW optimizer(decay_matrices_only(parameters, AdamWOptions(1.0).weight_decay(0.1)), AdamWOptions(1.0));
  for (const auto& p : parameters) p.tensor.mutable_grad() = torch::zeros_like(p.tensor).detach();
  optimizer.step();
  EXPECT_FLOAT_EQ(parameters[0].tensor[0][0].item<float>(), 0.9F);
  EXPECT_EQ(parameters[1].tensor[0].item<float>(), 1.0F);
  EXPECT_EQ(parameters[2].tensor[0].item<float>(), 1.0F);
}

// A bf16 gradient is widened, and the bf16 weight written, in the same pass: whole vectors and tails, special values too.
TEST(AdamWTest, Bf16PathsAreThoseOfFp32Bit) {
  for (const int64_t n : {1, 7, 16, 33, 40000}) {
    torch::manual_seed(static_cast<uint64_t>(n));
    const at::Tensor grad = torch::randn({n}).to(at::kBFloat16);
    grad[0] = n == 7 ? std::numeric_limits<double>::quiet_NaN() : 1e30;
    const at::Tensor wide = torch::randn({n});
    at::Tensor a = wide.clone(), b = wide.clone(), copy = torch::zeros({n}, at::kBFloat16);
    const auto moments = [n] { return std::pair(torch::zeros({n}), torch::zeros({n})); };
    const auto [m1, v1] = moments();
    const auto [m2, v2] = moments();
    const AdamWStep step{.lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1, .step = 1};
    adamw_update(step, a, grad, m1, v1, copy);
    adamw_update(step, b, grad.to(at::kFloat), m2, v2, {});
    EXPECT_TRUE(at::allclose(a, b, 0, 0, /*equal_nan=*/true)) << n;
    EXPECT_TRUE(at::allclose(v1, v2, 0, 0, /*equal_nan=*/true)) << n;
    EXPECT_TRUE(at::allclose(copy.to(at::kFloat), b.to(at::kBFloat16).to(at::kFloat), 0, 0, /*equal_nan=*/true)) << n;
    EXPECT_FALSE(at::equal(a, wide));
  }
}

TEST(StochasticRounding, IsExactInExpectationAndNeverOffByMoreThanOneStep) {
  const int64_t n = 100000;
  const float value = 1.0F + 0.3F / 128;  // bf16's step at 1 is 1/128
  const std::vector<float> values(n, value);
  std::vector<uint16_t> bits(n);
  round_stochastically(values.data(), bits.data(), n, 1, 2, 0);
  int64_t up = 0;
  for (const uint16_t b : bits) {
    ASSERT_TRUE(b == 0x3F80 || b == 0x3F81);
    up += b == 0x3F81;
  }
  // Binomial: standard deviation of the share is sqrt(0.3 * 0.7 / n) = 0.0014.
  EXPECT_NEAR(static_cast<double>(up) / n, 0.3, 0.01);
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const float special[] = {inf, -inf, nan, 0.0F, -1.5F};
  uint16_t out[5];
  round_stochastically(special, out, 5, 1, 2, 0);
  EXPECT_EQ(out[0], 0x7F80);
  EXPECT_EQ(out[1], 0xFF80);
  EXPECT_GT(out[2] & 0x7FFF, 0x7F80) << "NaN stays NaN";
  EXPECT_EQ(out[3], 0);
  EXPECT_EQ(out[4], 0xBFC0) << "what bf16 holds is kept";
}

// Fault class "bf16 weights without a master copy stop moving", without the master: the mean moves as fp32 does.
TEST(StochasticRounding, Bf16WeightsMoveWithoutMasters) {
  const auto run = [](bool rounded) {
    at::Tensor p = torch::ones({4096}, at::kBFloat16).requires_grad_();
    AdamW optimizer({OptimizerParamGroup({p})}, AdamWOptions(6e-4).weight_decay(0));
    if (rounded) optimizer.round_stochastically(7, {{"w", p}});
    for (int i = 0; i < 100; ++i) {
      p.mutable_grad() = torch::ones({4096}, at::kBFloat16);
      optimizer.step();
    }
    return p.detach().to(at::kFloat);
  };
  EXPECT_NEAR(run(true).mean().item<float>(), 0.94F, 1e-3F);
  EXPECT_GT(run(true).std().item<float>(), 0.0F);
  EXPECT_EQ(run(false)[0].item<float>(), 0.94140625F) << "with masters it is the rounding of 0.94";
  at::Tensor wide = torch::ones({1}).requires_grad_();
  AdamW optimizer({OptimizerParamGroup({wide})}, AdamWOptions(1e-3));
  EXPECT_THROW(optimizer.round_stochastically(7, {{"w", wide}}), ConfigError);
}

TEST(StochasticRounding, DoesNotDependOnHowAParameterIsCut) {
  torch::manual_seed(2);
  const at::Tensor start = torch::randn({1000}).to(at::kBFloat16), grad = torch::randn({1000}).to(at::kBFloat16);
  const auto run = [&](int64_t begin, int64_t n) {
    at::Tensor p = start.narrow(0, begin, n).clone().requires_grad_();
    AdamW optimizer({OptimizerParamGroup({p})}, AdamWOptions(1e-2));
    optimizer.round_stochastically(7, {{"w", p}}, {begin});
    for (int i = 0; i < 3; ++i) {
      p.mutable_grad() = grad.narrow(0, begin, n).clone();
      optimizer.step();
    }
    return p.detach();
  };
  const at::Tensor whole = run(0, 1000);
  for (const auto& [begin, n] : std::vector<std::pair<int64_t, int64_t>>{{0, 333}, {333, 334}, {667, 333}, {999, 1}})
    EXPECT_TRUE(at::equal(run(begin, n), whole.narrow(0, begin, n))) << begin;
}

// Fault class "optimizer moments dropped because state is created lazily".
TEST(AdamWTest, SavedAndLoadedBeforeTheFirstStepContinuesBitEqual) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto gradient = [&](int step) {
      torch::manual_seed(step);
      return torch::randn({50}).to(dtype);
    };
    at::Tensor p = torch::ones({50}, torch::dtype(dtype)).requires_grad_();
    AdamW whole({OptimizerParamGroup({p})}, AdamWOptions(1e-3));
    std::stringstream file;
    at::Tensor q;
    for (int step = 0; step < 16; ++step) {
      if (step == 8) {
        torch::save(whole, file);
        q = p.detach().clone().requires_grad_();
      }
      p.mutable_grad() = gradient(step);
      whole.step();
    }
    AdamW resumed({OptimizerParamGroup({q})}, AdamWOptions(1e-3));
    torch::load(resumed, file);
    for (int step = 8; step < 16; ++step) {
      q.mutable_grad() = gradient(step);
      resumed.step();
    }
    EXPECT_TRUE(at::equal(p.detach(), q.detach())) << dtype;
  }
}

TEST(AdamWTest, AmsgradIsRefused) {
  EXPECT_THROW(AdamW({OptimizerParamGroup({torch::ones({1}).requires_grad_()})}, AdamWOptions(1e-3).amsgrad(true)), ConfigError);
}

TEST(LearningRateTest, WarmsUpThenFollowsTheCurve) {
  const LearningRate cosine{.kind = LearningRate::Kind::cosine, .peak = 2.0, .warmup = 4, .total = 20, .final_ratio = 0.1};
  EXPECT_DOUBLE_EQ(cosine.at(0), 0.5);
  EXPECT_DOUBLE_EQ(cosine.at(3), 2.0);
  EXPECT_DOUBLE_EQ(cosine.at(4), 2.0);
  EXPECT_NEAR(cosine.at(12), 2.0 * (0.1 + 0.9 * 0.5), 1e-12);
  EXPECT_NEAR(cosine.at(20), 0.2, 1e-12);
  EXPECT_NEAR(cosine.at(1000), 0.2, 1e-12);
  const LearningRate linear{.kind = LearningRate::Kind::linear, .peak = 1.0, .warmup = 0, .total = 10};
  EXPECT_DOUBLE_EQ(linear.at(5), 0.5);
  const LearningRate wsd{.kind = LearningRate::Kind::wsd, .peak = 2.0, .warmup = 4, .total = 20, .decay = 5, .final_ratio = 0.1};
  EXPECT_DOUBLE_EQ(wsd.at(1), 1.0);
  for (const int64_t stable : {4, 10, 15}) EXPECT_DOUBLE_EQ(wsd.at(stable), 2.0) << stable;
  EXPECT_NEAR(wsd.at(17), 2.0 * (1 - 0.9 * 2 / 5), 1e-12);
  EXPECT_NEAR(wsd.at(20), 0.2, 1e-12);
  const LearningRate root{.kind = LearningRate::Kind::inverse_sqrt, .peak = 2.0, .warmup = 4, .total = 20, .final_ratio = 0.1};
  EXPECT_DOUBLE_EQ(root.at(4), 2.0);
  EXPECT_DOUBLE_EQ(root.at(16), 1.0);
  EXPECT_DOUBLE_EQ(root.at(1000000), 0.2);
  const LearningRate constant{.peak = 3.0};
  EXPECT_DOUBLE_EQ(constant.at(99), 3.0);
}

}  // namespace
}  // namespace weft::optim
