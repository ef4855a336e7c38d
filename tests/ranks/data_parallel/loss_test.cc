// Loss normalisation: sums divided by one global count, never a mean of means.
#include "tests/support/problem.h"
#include "weft/core/error.h"

namespace weft {
namespace {

using testing::on_threads;

/// One weight w, used as w * gradient_sum: its gradient is what the rank contributes.
struct OneWeight {
  at::Tensor w = torch::zeros({1}, torch::kDouble).requires_grad_();
  DataParallel dp;
  explicit OneWeight(const Comm& comm, DataParallelOptions options = {}) : dp({{"w", w}}, {}, comm, options) {}
};

// Micro-batches (loss sum, valid tokens) = (2, 1) and (90, 9): 9.2, not 6.
TEST(LossNormalisation, UnequalMicroBatchesShareOneDenominator) {
  OneWeight one{Comm()};
  double loss = 0;
  const std::vector<std::pair<double, int64_t>> micro{{2, 1}, {90, 9}};
  for (const auto& [sum, count] : micro) {
    const at::Tensor part = scale_loss((one.w + 1) * sum, 10, one.dp);
    part.backward();
    loss += part.item<double>();
  }
  EXPECT_DOUBLE_EQ(loss, 9.2);
  EXPECT_DOUBLE_EQ(one.w.grad().item<double>(), 9.2);
}

// Rank 0: 4 valid tokens, gradient sum 8; rank 1: 1 token, gradient sum 6: 14 / 5 = 2.8, not 4.
TEST(LossNormalisation, RanksWithUnequalCountsGiveTheGlobalMean) {
  for (const auto scale : {GradScale::mean_over_ranks, GradScale::sum}) {
    on_threads(2, [&](World& world) {
      OneWeight one(world.comm(), {.grad_scale = scale});
      const bool first = world.rank() == 0;
      global_mean((one.w * (first ? 8.0 : 6.0)).sum(), first ? 4 : 1, one.dp).backward();
      EXPECT_DOUBLE_EQ(one.w.grad().item<double>(), 2.8);
    });
  }
}

TEST(LossNormalisation, ARankWithEveryLabelIgnoredJoinsWithoutNaN) {
  on_threads(3, [](World& world) {
    OneWeight one(world.comm());
    const bool empty = world.rank() != 1;
    global_mean((one.w * (empty ? 0.0 : 6.0)).sum(), empty ? 0 : 3, one.dp).backward();
    EXPECT_DOUBLE_EQ(one.w.grad().item<double>(), 2.0);
    one.dp.zero_grad();
    const at::Tensor nothing = global_mean((one.w * 0.0).sum(), 0, one.dp);
    nothing.backward();
    EXPECT_EQ(nothing.item<double>(), 0.0);
    EXPECT_EQ(one.w.grad().item<double>(), 0.0);
  });
  OneWeight one{Comm()};
  EXPECT_THROW(scale_loss(one.w, -1, one.dp), ConfigError);
}

// 7 micro-batches in groups of 4: two updates, of 4 and of 3, each divided by its own count; nothing is left over.
TEST(LossNormalisation, AnIncompleteLastGroupIsDividedByWhatItHolds) {
  for (const int ranks : {1, 2}) {
    on_threads(ranks, [](World& world) {
      OneWeight one(world.comm());
      std::vector<double> updates;
      for (int64_t begin = 0; begin < 7; begin += 4) {
        const int64_t end = std::min<int64_t>(begin + 4, 7), count = end - begin;
        one.dp.zero_grad();
        for (int64_t k = begin; k < end; ++k) {
          one.dp.sync(k + 1 == end);
          scale_loss((one.w * static_cast<double>(k + 1)).sum(), count * world.size(), one.dp).backward();
        }
        updates.push_back(one.w.grad().item<double>());
      }
      EXPECT_THAT(updates, ::testing::ElementsAre(::testing::DoubleEq(10.0 / 4), ::testing::DoubleEq(18.0 / 3)));
    });
  }
}

// 3 micro-batches where 4 make a step: one update, divided by 3, and no gradient is left for the next epoch.
TEST(LossNormalisation, AnEpochShorterThanAStepStillUpdates) {
  on_threads(2, [](World& world) {
    OneWeight one(world.comm());
    torch::optim::SGD optimizer({one.w}, torch::optim::SGDOptions(1.0));
    for (int epoch = 0; epoch < 2; ++epoch) {
      optimizer.zero_grad();
      for (int k = 0; k < 3; ++k) {
        one.dp.sync(k == 2);
        scale_loss((one.w * (k + 1.0)).sum(), 3 * world.size(), one.dp).backward();
      }
      EXPECT_DOUBLE_EQ(one.w.grad().item<double>(), 2.0);
      optimizer.step();
    }
    EXPECT_DOUBLE_EQ(one.w.item<double>(), -4.0);
  });
}

// A parameter whose first gradient comes in the last micro-step, in bf16 beside fp32 sums of others.
TEST(LowPrecision, AGradientOfTheLastMicroStepOnlyIsKeptInFp32Too) {
  on_threads(2, [](World& world) {
    at::Tensor w = torch::zeros({1}, torch::kBFloat16).requires_grad_(), late = torch::zeros({1}, torch::kBFloat16).requires_grad_();
    DataParallel dp({{"w", w}, {"late", late}}, {}, world.comm(), {.gradient_dtype = at::kFloat});
    for (int k = 0; k < 3; ++k) {
      dp.sync(k == 2);
      (k == 2 ? w + 3 * late : w).sum().backward();
    }
    EXPECT_EQ(w.grad().item<float>(), 3.0F);
    EXPECT_EQ(late.grad().scalar_type(), at::kFloat);
    EXPECT_EQ(late.grad().item<float>(), 3.0F);
  });
}

// 1.0 and then 256 additions of 2^-9: 1.5, where a bf16 accumulator stays at 1.0. On one rank as on several.
TEST(LowPrecision, GradientsOfBf16ParametersAccumulateInFp32) {
  for (const int ranks : {1, 2}) {
    on_threads(ranks, [](World& world) {
      at::Tensor w = torch::zeros({1}, torch::kBFloat16).requires_grad_();
      DataParallel dp({{"w", w}}, {}, world.comm(), {.gradient_dtype = at::kFloat});
      for (int k = 0; k <= 256; ++k) {
        dp.sync(k == 256);
        (w * (k == 0 ? 1.0 : 0x1p-9)).sum().backward();
      }
      EXPECT_EQ(w.grad().scalar_type(), at::kFloat);
      EXPECT_EQ(w.grad().item<float>(), 1.5F);
    });
  }
}

// The same 4 sequences as (batch 4, accumulation 1), (2, 2), (1, 4), on 1 and 2 ranks, with a side loss per token.
TEST(LossNormalisation, GradientNormDoesNotDependOnTheShapeOfTheBatch) {
  const std::vector<double> sequences{3, 1, 4, 1};  // valid tokens per sequence, 9 in all
  const auto norm = [&](const Comm& comm, int64_t micro_steps) {
    OneWeight one(comm);
    const int64_t per = 4 / micro_steps / comm.size();
    for (int64_t k = 0; k < micro_steps; ++k) {
      one.dp.sync(k + 1 == micro_steps);
      at::Tensor sum = torch::zeros({1}, torch::kDouble);
      for (int64_t i = 0; i < per; ++i) {
        const double tokens = sequences[(k * comm.size() + comm.rank()) * per + i];
        sum = sum + one.w * tokens * tokens + 0.1 * one.w * tokens;  // main and side loss: one denominator
      }
      scale_loss(sum.sum(), 9, one.dp).backward();
    }
    return one.dp.grad_norm();
  };
  const double expected = (9 + 1 + 16 + 1 + 0.9) / 9;
  for (const int64_t micro_steps : {1, 2, 4}) EXPECT_NEAR(norm(Comm(), micro_steps), expected, 1e-14);
  on_threads(2, [&](World& world) {
    for (const int64_t micro_steps : {1, 2}) EXPECT_NEAR(norm(world.comm(), micro_steps), expected, 1e-14);
  });
}

}  // namespace
}  // namespace weft
