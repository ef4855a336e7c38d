// SyncBatchNorm on several ranks is libtorch's BatchNorm on one rank with the whole batch.
#include "weft/nn/sync_batch_norm.h"

#include <numeric>
#include <torch/nn/modules/batchnorm.h>

#include "tests/support/problem.h"
#include "tests/support/tolerances.h"
#include "weft/core/error.h"

namespace weft {
namespace {

using testing::on_threads;


void expect_close(const at::Tensor& a, const at::Tensor& b, const char* what) {
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  const double scale = std::max(b.abs().max().item<double>(), 1e-12);
  EXPECT_LE((a - b).abs().max().item<double>(), testing::kFp64Parity * scale) << what;
}

constexpr int64_t kRows = 7, kChannels = 5;
/// Batches of four steps, [7, 5, 3, 2].
at::Tensor batch(int step) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(40 + step);
  return torch::randn({kRows, kChannels, 3, 2}, generator, torch::kDouble) * 3 + 100;  // far from zero: cancellation shows
}
at::Tensor weights_of_loss() { return torch::sin(torch::arange(kRows * kChannels * 6, torch::kDouble)).view({kRows, kChannels, 3, 2}); }

struct Result {
  at::Tensor out, grad_x, grad_weight, grad_bias, mean, variance;
};

/// Three training steps, then one in eval mode; what the last of each shows, of `rows` rows from `begin`.
template <class Norm>
std::pair<Result, at::Tensor> run(Norm& norm, int64_t begin, int64_t rows) {
  norm->to(torch::kDouble);
  {
    const at::NoGradGuard no_grad;
    norm->weight.copy_(torch::arange(kChannels) + 1.0);
    norm->bias.copy_(torch::arange(kChannels) * -0.5);
  }
  Result result;
  for (int step = 0; step < 3; ++step) {
    norm->zero_grad();
    const at::Tensor x = batch(step).narrow(0, begin, rows).requires_grad_();
    result.out = norm->forward(x);
    (result.out.pow(3) * weights_of_loss().narrow(0, begin, rows)).sum().backward();
    result.grad_x = x.grad();
  }
  result.grad_weight = norm->weight.grad();
  result.grad_bias = norm->bias.grad();
  result.mean = norm->running_mean.clone();
  result.variance = norm->running_var.clone();
  norm->eval();
  return {result, norm->forward(batch(3).narrow(0, begin, rows))};
}

TEST(SyncBatchNorm, EqualsOneRankWithTheWholeBatch) {
  for (const auto& rows : std::vector<std::vector<int64_t>>{{7}, {4, 3}, {6, 1}, {3, 3, 1}, {5, 0, 2}}) {
    for (const std::optional<double> momentum : {std::optional<double>(0.1), std::optional<double>()}) {
      torch::nn::BatchNorm2d plain(torch::nn::BatchNorm2dOptions(kChannels).momentum(momentum));
      const auto [expected, expected_eval] = run(plain, 0, kRows);
      ASSERT_GT(expected.grad_x.abs().max().item<double>(), 1e-3);
      on_threads(static_cast<int>(rows.size()), [&, &expected = expected, &expected_eval = expected_eval](World& world) {
        nn::SyncBatchNorm norm(kChannels, world.comm(), nn::SyncBatchNormOptions{.momentum = momentum});
        const int64_t count = rows[static_cast<size_t>(world.rank())];
        const int64_t begin = std::accumulate(rows.begin(), rows.begin() + world.rank(), int64_t{0});
        const auto [mine, eval] = run(norm, begin, count);
        expect_close(mine.mean, expected.mean, "running mean");
        expect_close(mine.variance, expected.variance, "running variance");
        EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 3);
        at::Tensor weight = mine.grad_weight.clone(), bias = mine.grad_bias.clone();
        world.comm().all_reduce(weight).wait();
        world.comm().all_reduce(bias).wait();
        expect_close(weight, expected.grad_weight, "gradient of weight");
        expect_close(bias, expected.grad_bias, "gradient of bias");
        if (count == 0) return;
        expect_close(mine.out, expected.out.narrow(0, begin, count), "output");
        expect_close(mine.grad_x, expected.grad_x.narrow(0, begin, count), "gradient of input");
        expect_close(eval, expected_eval.narrow(0, begin, count), "eval output");
      });
    }
  }
}

TEST(SyncBatchNorm, DifferentiatesTwice) {
  const auto penalty = [](const at::Tensor& y, const at::Tensor& x, const at::Tensor& c) {
    const at::Tensor g = torch::autograd::grad({(y.pow(3) * c).sum()}, {x}, {}, true, true)[0];
    return torch::autograd::grad({g.square().sum()}, {x})[0];
  };
  torch::nn::BatchNorm1d plain(torch::nn::BatchNorm1dOptions(kChannels).affine(false));
  plain->to(torch::kDouble);
  const at::Tensor all = batch(0).select(3, 0).contiguous(), c = weights_of_loss().select(3, 0);
  const at::Tensor whole = all.clone().requires_grad_();
  const at::Tensor expected = penalty(plain(whole), whole, c);
  ASSERT_GT(expected.abs().max().item<double>(), 1e-3);
  on_threads(2, [&](World& world) {
    nn::SyncBatchNorm norm(kChannels, world.comm(), nn::SyncBatchNormOptions{.affine = false});
    const int64_t begin = world.rank() * 4, rows = world.rank() == 0 ? 4 : 3;
    const at::Tensor x = all.narrow(0, begin, rows).clone().requires_grad_();
    expect_close(penalty(norm(x), x, c.narrow(0, begin, rows)), expected.narrow(0, begin, rows), "second derivative");
  });
}

TEST(SyncBatchNorm, TakesTheValuesOfABatchNorm) {
  on_threads(2, [](World& world) {
    torch::nn::BatchNorm2d plain(torch::nn::BatchNorm2dOptions(3).eps(0.5).momentum(0.25));
    plain->running_mean.fill_(2.0);
    nn::SyncBatchNorm norm = nn::synchronised(plain, world.comm());
    EXPECT_EQ(norm->weight.data_ptr(), plain->weight.data_ptr());
    EXPECT_EQ(norm->running_mean.data_ptr(), plain->running_mean.data_ptr());
    norm->eval();
    plain->eval();
    const at::Tensor x = torch::ones({2, 3, 1, 1});
    EXPECT_TRUE(at::equal(norm(x), plain(x)));
    EXPECT_EQ(norm->named_buffers().keys(), plain->named_buffers().keys());
    EXPECT_EQ(norm->named_parameters().keys(), plain->named_parameters().keys());
  });
}

TEST(SyncBatchNorm, LowPrecisionKeepsItsDtypeAndFp64Statistics) {
  on_threads(2, [](World& world) {
    nn::SyncBatchNorm norm(1, world.comm());
    const at::Tensor x = torch::tensor({{256.0}, {258.0}, {260.0}, {262.0}}).narrow(0, world.rank() * 2, 2).to(at::kBFloat16);
    const at::Tensor y = norm(x);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    const double spread = std::sqrt(5.0);
    EXPECT_NEAR(y[0][0].item<double>(), (world.rank() == 0 ? -3 : 1) / spread, 0.01);
  });
}

TEST(SyncBatchNorm, BadInputIsAnErrorOnEveryRank) {
  on_threads(2, [](World& world) {
    nn::SyncBatchNorm norm(3, world.comm());
    EXPECT_THROW(norm(torch::ones({2, 4})), ConfigError);
    EXPECT_THROW(norm(torch::ones({3})), ConfigError);
    EXPECT_THROW(norm(torch::ones({world.rank() == 0 ? 1 : 0, 3})), ConfigError);  // one value per channel
    EXPECT_EQ(norm(torch::ones({0, 3})).size(0), 0);
    EXPECT_THROW(nn::SyncBatchNorm(0, world.comm()), ConfigError);
  });
}

}  // namespace
}  // namespace weft
