// Fused kernels against the formula in libtorch's operators, values and gradients.
#include <gtest/gtest.h>
#include <torch/types.h>

#include "weft/core/error.h"
#include "weft/nn/functional.h"
#include "weft/nn/rope.h"

namespace weft::nn {
namespace {

/// Sizes that are no multiple of any vector length, and one that is.
const std::vector<int64_t> kWidths = {1, 7, 64, 131};

/// fp64 1e-12; fp32 a few rounding errors of 6e-8; bf16 its half unit of 4e-3, once in each of two roundings.
double tolerance(torch::Dtype type) { return type == torch::kDouble ? 1e-12 : type == torch::kFloat ? 2e-6 : 1.6e-2; }

double error_of(const torch::Tensor& a, const torch::Tensor& b) {
  const auto x = a.to(torch::kDouble), y = b.to(torch::kDouble);
  return (x - y).abs().max().item<double>() / std::max(y.abs().max().item<double>(), 1e-30);
}

using Function = std::function<torch::Tensor(const std::vector<torch::Tensor>&)>;

/// Compares fused(inputs) with plain(inputs computed in fp64), and the gradients of a weighted sum.
void expect_same(const std::vector<torch::Tensor>& inputs, const Function& fused, const Function& plain, torch::Dtype type) {
  std::vector<torch::Tensor> mine, theirs;
  for (const auto& t : inputs) {
    const auto rounded = t.to(type);
    mine.push_back(rounded.clone().requires_grad_());
    theirs.push_back(rounded.to(torch::kDouble).requires_grad_());
  }
  const auto y = fused(mine), expected = plain(theirs);
  EXPECT_LE(error_of(y, expected), tolerance(type));
  const auto weights = torch::randn(expected.sizes(), torch::kDouble).to(type);
  (y * weights.to(y.scalar_type())).sum().backward();
  (expected * weights.to(torch::kDouble)).sum().backward();
  for (size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_GT(theirs[i].grad().abs().max().item<double>(), 0.0) << i;
    EXPECT_LE(error_of(mine[i].grad(), theirs[i].grad()), tolerance(type)) << "gradient " << i;
  }
}

class Fused : public ::testing::TestWithParam<torch::Dtype> {
 protected:
  void SetUp() override { torch::manual_seed(11); }
  static torch::Tensor random(torch::IntArrayRef sizes) { return torch::randn(sizes, torch::kDouble); }
};

TEST_P(Fused, RmsNorm) {
  for (const int64_t n : kWidths) {
    const auto formula = [](const std::vector<torch::Tensor>& in) {
      return in[0] * (in[0].square().mean(-1, true) + 1e-5).rsqrt() * in[1];
    };
    if (n == 1) continue;  // the gradient of x / |x| is rounding alone
    // 300 rows: more than one partial sum of the weight's gradient.
    expect_same({random({2, 150, n}), random({n})},
                [](const auto& in) { return rms_norm(in[0], in[1], 1e-5, Kernels::fused); }, formula, GetParam());
  }
}

TEST_P(Fused, Swiglu) {
  for (const int64_t n : kWidths)
    expect_same({random({3, n}) * 4, random({3, n})},
                [](const auto& in) { return gated(in[0], in[1], model::Activation::silu, Kernels::fused); },
                [](const auto& in) { return in[0] * torch::sigmoid(in[0]) * in[1]; }, GetParam());
}

TEST_P(Fused, RopeWithPartialHeads) {
  for (const double fraction : {1.0, 0.5}) {
    const model::RopeSpec spec{.fraction = fraction};
    const auto table = [&](torch::Dtype type) { return rope_table(spec, 24, 5, torch::TensorOptions(type)); };
    expect_same({random({2, 5, 4, 24}), random({2, 5, 2, 24})},
                [&](const auto& in) {
                  const auto [q, k] = rope(in[0], in[1], table(GetParam()), Kernels::fused);
                  return torch::cat({q, k}, 2);
                },
                [&](const auto& in) {
                  const auto [q, k] = rope(in[0], in[1], table(torch::kDouble), Kernels::torch);
                  return torch::cat({q, k}, 2);
                },
                GetParam());
  }
}

TEST_P(Fused, LinearCrossEntropyIgnoresRows) {
  for (const int64_t vocab : {7, 131}) {
    auto targets = torch::randint(vocab, {9});
    targets[3] = -100;
    expect_same({random({9, 16}), random({vocab, 16})},
                [&](const auto& in) {
                  const auto [sum, valid] = linear_cross_entropy(in[0], in[1], targets, -100, 0, Kernels::fused);
                  EXPECT_EQ(valid, 8);
                  return sum;
                },
                [&](const auto& in) {
                  const auto logp = torch::log_softmax(torch::matmul(in[0], in[1].t()), -1);
                  return -logp.gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1).masked_select(targets != -100).sum();
                },
                GetParam());
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Fused, ::testing::Values(torch::kDouble, torch::kFloat, torch::kBFloat16),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST(FusedErrors, SecondDerivativesSecondBackwardsAndWildTargetsAreRefused) {
  const auto x = torch::randn({4, 8}, torch::requires_grad()), w = torch::randn({8}, torch::requires_grad());
  const auto y = rms_norm(x, w, 1e-5, Kernels::fused).sum();
  EXPECT_THROW(torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true), ConfigError);
  const auto head = torch::randn({5, 8}, torch::requires_grad());
  const auto loss = linear_cross_entropy(x, head, torch::zeros({4}, torch::kLong), -100, 0, Kernels::fused).sum;
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_THROW(loss.backward(), ConfigError);
  EXPECT_THROW(linear_cross_entropy(x, head, torch::full({4}, 5, torch::kLong), -100, 0, Kernels::fused), ConfigError);
}

}  // namespace
}  // namespace weft::nn
