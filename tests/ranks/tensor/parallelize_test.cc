// Tensor parallelism of a user's own modules, built from torch::nn alone.
#include <gmock/gmock.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>

#include "tests/support/ranks.h"
#include "tests/support/test_pch.h"
#include "weft/comm/mesh.h"
#include "weft/core/error.h"
#include "weft/nn/deferred.h"
#include "weft/nn/unit.h"
#include "weft/parallel/parallelize.h"
#include "weft/parallel/whole.h"

namespace weft {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::on_threads;

constexpr int64_t kWidth = 8, kHeads = 4, kIds = 11, kTokens = 6;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    for (auto [name, layer] : {std::pair{"wq", &wq}, {"wk", &wk}, {"wv", &wv}, {"wo", &wo}}) *layer = register_module(name, Split<torch::nn::Linear>(kWidth, kWidth));
    w1 = register_module("w1", Split<torch::nn::Linear>(kWidth, 12));
    w2 = register_module("w2", Split<torch::nn::Linear>(12, kWidth));
  }
  at::Tensor forward(const at::Tensor& input) {
    const at::Tensor h = norm(input);
    const auto heads = [](const at::Tensor& y) { return y.view({y.size(0), y.size(1), -1, kWidth / kHeads}).transpose(1, 2); };
    const at::Tensor y = torch::scaled_dot_product_attention(heads(wq(h)), heads(wk(h)), heads(wv(h)), {}, 0.0, /*is_causal=*/true);
    const at::Tensor x = input + wo(y.transpose(1, 2).flatten(2));
    return x + w2(torch::tanh(w1(x)));
  }
  torch::nn::LayerNorm norm{nullptr};
  Split<torch::nn::Linear> wq{nullptr}, wk{nullptr}, wv{nullptr}, wo{nullptr}, w1{nullptr}, w2{nullptr};
};
TORCH_MODULE(Block);

struct TokenNetImpl : torch::nn::Module {
  TokenNetImpl() {
    tok = register_module("tok", Split<torch::nn::Embedding>(kIds, kWidth));
    a = register_module("a", Unit<Block>());
    b = register_module("b", Unit<Block>());
    head = register_module("head", torch::nn::Linear(kWidth, 3));
    to(torch::kDouble);
  }
  at::Tensor forward(const at::Tensor& tokens) { return head(b(a(tok(tokens)))); }  // [B, T] -> [B, T or this rank's part of it, 3]
  Split<torch::nn::Embedding> tok{nullptr};
  Unit<Block> a{nullptr}, b{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(TokenNet);

const TensorPlan kCut{{"*.wq|*.wk|*.wv|*.w1", TensorStyle::column}, {"*.wo|*.w2|tok", TensorStyle::row}};
const TensorPlan kSequence{{"*.norm|head", TensorStyle::sequence}, kCut[0], kCut[1]};

struct Outcome {
  double loss = 0, norm = 0;
  std::vector<NamedTensor> gradients;
};

/// One backward over tokens [4, 6] of which each data-parallel rank has its rows.
Outcome run(const Comm& dp_ranks, const Comm& tp, const TensorPlan& plan, bool deferred_until_wrapped, DataParallelOptions options) {
  TokenNet net = deferred([] { return TokenNet(); }, {.seed = 3});
  if (!deferred_until_wrapped) materialise(net);
  parallelize(*net, tp, plan);
  options.grad_scale = GradScale::sum;
  DataParallel dp(net, dp_ranks, options);
  const int64_t rows = 4 / dp_ranks.size();
  const at::Tensor tokens = (at::arange(4 * kTokens, at::kLong).view({4, kTokens}) * 7).remainder(kIds).narrow(0, dp_ranks.rank() * rows, rows);
  const bool sequence = tp.size() > 1 && plan.size() == kSequence.size();
  at::Tensor weights = at::arange(4 * kTokens, at::kDouble).view({4, kTokens, 1}).sin().narrow(0, dp_ranks.rank() * rows, rows);
  if (sequence) weights = weights.narrow(1, tp.rank() * (kTokens / tp.size()), kTokens / tp.size());
  const at::Tensor loss = (net(tokens).square() * weights).sum();
  loss.backward();
  Outcome outcome;
  at::Tensor total = loss.detach().clone();
  dp_ranks.all_reduce(total).wait();
  if (sequence) tp.all_reduce(total).wait();
  outcome.loss = total.item<double>();
  outcome.norm = dp.grad_norm();
  outcome.gradients = parallel::whole_gradients(dp);
  return outcome;
}

TEST(Parallelize, AUsersTransformerTrainsAsOnOneRank) {
  const Outcome reference = run(Comm(), Comm(), kCut, false, {});
  ASSERT_GT(reference.norm, 1e-3);
  for (const int tp_ranks : {2, 4}) {
    for (const int dp_ranks : {1, 2}) {
      on_threads(tp_ranks * dp_ranks, [&](World& world) {
        const Mesh mesh(world, {{"dp", dp_ranks}, {"tp", tp_ranks}});
        for (const bool deferred_until_wrapped : {false, true}) {
          for (const TensorPlan* plan : {&kCut, &kSequence}) {
            if (plan == &kSequence && kTokens % tp_ranks != 0) continue;
            for (const Sharding sharding : {Sharding::none, Sharding::parameters}) {
              const Outcome outcome = run(mesh["dp"], mesh["tp"], *plan, deferred_until_wrapped, {.sharding = sharding});
              EXPECT_NEAR(outcome.loss, reference.loss, 1e-10 * std::abs(reference.loss));
              EXPECT_NEAR(outcome.norm, reference.norm, 1e-10 * reference.norm);
              ASSERT_EQ(outcome.gradients.size(), reference.gradients.size());
              for (size_t i = 0; i < reference.gradients.size(); ++i) {
                const auto& [name, expected] = reference.gradients[i];
                ASSERT_EQ(outcome.gradients[i].name, name);
                ASSERT_EQ(outcome.gradients[i].tensor.sizes(), expected.sizes()) << name;
                EXPECT_LT((outcome.gradients[i].tensor - expected).abs().max().item<double>(), 1e-10 * std::max(1e-6 * reference.norm, expected.abs().max().item<double>())) << name;
              }
            }
          }
        }
      });
    }
  }
}

TEST(Parallelize, SaysByNameWhatItCannotShareOut) {
  on_threads(2, [](World& world) {
    const auto refusal = [&](const TensorPlan& plan) -> std::string {
      TokenNet net = deferred([] { return TokenNet(); }, {.seed = 3});
      try {
        parallelize(*net, world.comm(), plan);
      } catch (const ConfigError& error) {
        return error.what();
      }
      return "nothing";
    };
    EXPECT_THAT(refusal({{"head", TensorStyle::column}}), AllOf(HasSubstr("'head'"), HasSubstr("weft::Split<torch::nn::Linear>")));
    EXPECT_THAT(refusal({{"a.w9", TensorStyle::column}}), AllOf(HasSubstr("'a.w9'"), HasSubstr("a.w2")));
    EXPECT_THAT(refusal({{"tok", TensorStyle::column}}), HasSubstr("style row"));
    EXPECT_THAT(refusal({{"a.wq", TensorStyle::column}, {"*.wq", TensorStyle::column}}), HasSubstr("'a.wq' is cut already"));
    TokenNet other = deferred([] { return TokenNet(); }, {.seed = static_cast<uint64_t>(world.rank())});
    EXPECT_THROW(parallelize(*other, world.comm(), kCut), ConfigError) << "ranks with different seeds";
  });
  on_threads(3, [](World& world) {
    TokenNet net = deferred([] { return TokenNet(); }, {.seed = 3});
    try {
      parallelize(*net, world.comm(), kCut);
      ADD_FAILURE() << "accepted";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("'a.wq' has 8 outputs"), HasSubstr("1, 2, 4, 8")));
    }
  });
}

}  // namespace
}  // namespace weft
