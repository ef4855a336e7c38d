// weft::deferred: modules without memory, whose values are functions of (seed, name, element).
#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformerlayer.h>

#include "weft/nn/deferred.h"

#include "tests/support/message.h"
#include "tests/support/test_pch.h"
#include "weft/core/error.h"
#include "weft/nn/start_values.h"

namespace weft {
namespace {

using ::testing::HasSubstr;

/// What torch::nn and users do to their tensors.
struct ZooImpl : torch::nn::Module {
  explicit ZooImpl(bool extra_layer = false) {
    if (extra_layer) register_module("extra", torch::nn::Linear(5, 7));
    linear = register_module("linear", torch::nn::Linear(40, 50));
    twin = register_module("twin", torch::nn::Linear(40, 50));
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3)));
    table = register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(30, 20).padding_idx(2)));
    norm = register_module("norm", torch::nn::BatchNorm1d(9));
    lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(6, 5)));
    encoder = register_module("encoder", torch::nn::TransformerEncoderLayer(torch::nn::TransformerEncoderLayerOptions(8, 2)));
    scaled = register_parameter("scaled", torch::randn({60, 60}) * 0.1 + 3);
    turned = register_parameter("turned", torch::empty({12, 12}));
    torch::nn::init::orthogonal_(turned);
    low = register_parameter("low", torch::empty({64}, torch::kBFloat16).uniform_(-1, 1));
    positions = register_buffer("positions", torch::arange(7).view({7, 1}) * torch::full({1, 3}, 2));
    mask = register_buffer("mask", torch::triu(torch::ones({4, 4}), 1));
    torch::NoGradGuard no_grad;
    lstm->named_parameters()["bias_ih_l0"].slice(0, 5, 10).fill_(1);  // the forget gate
    twin->bias.copy_(linear->bias);
  }
  torch::nn::Linear linear{nullptr}, twin{nullptr};
  torch::nn::Conv2d conv{nullptr};
  torch::nn::Embedding table{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::TransformerEncoderLayer encoder{nullptr};
  at::Tensor scaled, turned, low, positions, mask;
};
TORCH_MODULE(Zoo);

Zoo made(uint64_t seed, bool extra_layer = false) {
  Zoo zoo = deferred([&] { return Zoo(extra_layer); }, {.seed = seed});
  materialise(zoo);
  return zoo;
}

TEST(Deferred, NothingHasMemoryUntilItIsMade) {
  const Zoo plain;
  Zoo zoo = deferred([] { return Zoo(); });
  ASSERT_EQ(zoo->named_parameters().size(), plain->named_parameters().size());
  for (const auto& item : plain->named_parameters()) {
    const at::Tensor parameter = zoo->named_parameters()[item.key()];
    EXPECT_TRUE(parameter.is_meta()) << item.key();
    EXPECT_EQ(parameter.sizes(), item.value().sizes());
    EXPECT_EQ(parameter.scalar_type(), item.value().scalar_type());
    EXPECT_TRUE(parameter.requires_grad());
  }
  for (const at::Tensor& buffer : zoo->buffers()) EXPECT_TRUE(buffer.is_meta());
  EXPECT_FALSE(torch::ones({2}).is_meta()) << "outside of the scope";
  const at::Tensor weight = zoo->linear->weight;
  materialise(zoo);
  EXPECT_TRUE(weight.is_cpu()) << "the same tensor";
  zoo->linear(torch::ones({2, 40})).sum().backward();
  EXPECT_TRUE(weight.grad().defined());
}

TEST(Deferred, ValuesFollowTheDistributionsThatTorchUses) {
  const Zoo zoo = made(3);
  const double bound = 1 / std::sqrt(40.0);  // kaiming_uniform with a = sqrt(5)
  EXPECT_LE(zoo->linear->weight.abs().max().item<double>(), bound);
  EXPECT_NEAR(zoo->linear->weight.std().item<double>(), bound / std::sqrt(3.0), 0.05 * bound);
  EXPECT_LE(zoo->linear->bias.abs().max().item<double>(), bound);
  EXPECT_NEAR(zoo->table->weight.std().item<double>(), 1.0, 0.1);
  EXPECT_EQ(zoo->table->weight[2].abs().max().item<double>(), 0.0) << "the padding row";
  EXPECT_GT(zoo->table->weight[3].abs().max().item<double>(), 0.0);
  EXPECT_TRUE(at::equal(zoo->norm->weight, torch::ones({9})));
  EXPECT_TRUE(at::equal(zoo->norm->running_var, torch::ones({9})));
  EXPECT_EQ(zoo->norm->num_batches_tracked.item<int64_t>(), 0);
  const at::Tensor gates = zoo->lstm->named_parameters()["bias_ih_l0"];
  EXPECT_EQ(gates.slice(0, 5, 10).min().item<double>(), 1.0);
  EXPECT_LT(gates.slice(0, 0, 5).max().item<double>(), 1.0);
  EXPECT_NEAR(zoo->scaled.mean().item<double>(), 3.0, 0.01);
  EXPECT_NEAR(zoo->scaled.std().item<double>(), 0.1, 0.01);
  const at::Tensor product = torch::matmul(zoo->turned, zoo->turned.t());
  EXPECT_LT((product - torch::eye(12)).abs().max().item<double>(), 1e-5);
  EXPECT_GT(zoo->low.to(torch::kFloat).std().item<double>(), 0.4);
  EXPECT_TRUE(at::equal(zoo->positions, torch::arange(7).view({7, 1}) * torch::full({1, 3}, 2)));
  EXPECT_TRUE(at::equal(zoo->mask, torch::triu(torch::ones({4, 4}), 1)));
  EXPECT_TRUE(at::equal(zoo->twin->bias, zoo->linear->bias)) << "copied from another parameter";
  for (const auto& item : zoo->named_parameters()) EXPECT_TRUE(item.value().isfinite().all().item<bool>()) << item.key();
}

TEST(Deferred, ValuesDependOnSeedAndNameAlone) {
  const Zoo zoo = made(3), again = made(3), other = made(4), longer = made(3, /*extra_layer=*/true);
  for (const auto& item : zoo->named_parameters()) {
    EXPECT_TRUE(at::equal(item.value(), again->named_parameters()[item.key()])) << item.key();
    EXPECT_TRUE(at::equal(item.value(), longer->named_parameters()[item.key()])) << item.key();
  }
  EXPECT_FALSE(at::equal(zoo->linear->weight, other->linear->weight));
  EXPECT_FALSE(at::equal(zoo->turned, other->turned));
  EXPECT_FALSE(at::equal(zoo->linear->weight, zoo->twin->weight));
}

TEST(Deferred, APartIsTheSameAsThatPartOfTheWhole) {
  const Zoo zoo = deferred([] { return Zoo(); }, {.seed = 3});
  const Zoo whole = made(3);
  for (const auto& item : zoo->named_parameters()) {
    const at::Tensor reference = whole->named_parameters()[item.key()].detach().flatten();
    const auto values = nn::start_values(item.value());
    ASSERT_NE(values, nullptr) << item.key();
    for (const auto& [begin, end] : {std::pair{int64_t{0}, reference.numel()}, {reference.numel() / 3, reference.numel() / 3 * 2 + 1}}) {
      const at::Tensor part = torch::full({end - begin}, 77, reference.options());
      values->write(begin, part);
      EXPECT_TRUE(at::equal(part, reference.slice(0, begin, end))) << item.key() << " from " << begin;
    }
  }
}

TEST(Deferred, DtypeChangesInside) {
  const auto low = deferred([] {
    torch::nn::Linear linear(6, 5);
    linear->to(torch::kDouble);
    return linear;
  });
  auto usual = deferred([] { return torch::nn::Linear(6, 5); });
  materialise(low);
  materialise(usual);
  EXPECT_EQ(low->weight.scalar_type(), torch::kDouble);
  EXPECT_GT(low->weight.abs().max().item<double>(), 0);
  EXPECT_TRUE(at::equal(low->weight, usual->weight.to(torch::kDouble)));
  auto outside = deferred([] { return torch::nn::Linear(6, 5); });
  outside->to(torch::kDouble);
  EXPECT_THAT(testing::message_of([&] { materialise(outside); }), HasSubstr("'weight' is on the meta device, and nothing says its values"));
}

TEST(Deferred, WhatNeedsValuesSaysSo) {
  const auto build = [](const std::function<void(at::Tensor&)>& spoil) {
    return testing::message_of([&] {
      deferred([&] {
        torch::nn::Linear linear(6, 5);
        const torch::NoGradGuard no_grad;
        spoil(linear->weight);
        return linear;
      });
    });
  };
  EXPECT_NE(build([](at::Tensor& w) { w.mul_(w.max().item<float>()); }), "no error");
  EXPECT_NE(build([](at::Tensor&) { torch::tensor(std::vector<float>{1, 2, 3}); }), "no error");
  EXPECT_NE(build([](at::Tensor& w) { w.data_ptr<float>()[0] = 1; }), "no error");
  EXPECT_THAT(build([](at::Tensor& w) { EXPECT_TRUE(at::equal(w, w)); }), HasSubstr("weft::deferred: aten::equal cannot be done without values"));
  EXPECT_FALSE(torch::ones({2}).is_meta()) << "an exception ends the scope";
}

}  // namespace
}  // namespace weft
