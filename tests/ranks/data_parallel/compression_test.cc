// Gradients in another dtype on the wire, and hooks of the user's own.
#include <torch/nn/modules/container/sequential.h>

#include "tests/support/problem.h"
#include "tests/support/tolerances.h"
#include "weft/core/error.h"

namespace weft {
namespace {

using testing::difference;
using testing::on_threads;
using testing::Trace;
using testing::train;

at::Tensor gradient_of(int rank, int64_t numel) {
  return torch::randn({numel}, at::make_generator<at::CPUGeneratorImpl>(100 + rank), torch::kDouble);
}

// Element by element: each rank's gradient is rounded once, the sum forms in fp32, the result is rounded once.
TEST(ReduceDtype, StaysWithinTheStatedBound) {
  for (const auto backend : {BackendKind::local, BackendKind::gloo}) {
    for (const int ranks : {2, 3}) {
      constexpr int64_t kNumel = 1001;  // not a multiple of the ranks
      at::Tensor mean = torch::zeros({kNumel}, torch::kDouble), magnitude = torch::zeros({kNumel}, torch::kDouble);
      for (int r = 0; r < ranks; ++r) {
        const at::Tensor g = gradient_of(r, kNumel).to(at::kFloat).to(at::kDouble);
        mean += g / ranks;
        magnitude += g.abs() / ranks;
      }
      on_threads(ranks, [&](World& world) {
        at::Tensor w = torch::zeros({kNumel}).requires_grad_();
        DataParallel dp({{"w", w}}, {}, world.comm(), {.reduce_dtype = at::kBFloat16});
        for (int step = 0; step < 2; ++step) {
          w.mutable_grad().reset();
          (w * gradient_of(world.rank(), kNumel).to(at::kFloat)).sum().backward();
          EXPECT_EQ(w.grad().scalar_type(), at::kFloat);
          const at::Tensor error = (w.grad().to(at::kDouble) - mean).abs();
          constexpr double kUnit = 0x1p-8, kSecondOrder = 1.01;  // bf16 has 8 significant bits
          EXPECT_TRUE((error <= kSecondOrder * kUnit * (magnitude + mean.abs())).all().item<bool>());
          EXPECT_GT(error.max().item<double>(), 1e-6) << "nothing was rounded";
        }
      }, backend);
    }
  }
}

// 2^-9 from each of many micro-steps and ranks: a bf16 accumulator over ranks would lose them against 1.
TEST(ReduceDtype, SumsOverRanksFormInFp32) {
  on_threads(4, [](World& world) {
    at::Tensor w = torch::zeros({1}).requires_grad_();
    DataParallel dp({{"w", w}}, {}, world.comm(), {.grad_scale = GradScale::sum, .reduce_dtype = at::kBFloat16});
    (w * (world.rank() == 0 ? 1.0 : 0x1p-8 / 3 * 2)).sum().backward();  // three times 2^-8 * 2/3: 2^-7, one bf16 step above 1
    EXPECT_EQ(w.grad().item<float>(), 1.0F + 0x1p-7F);
  });
}

TEST(ReduceDtype, HalvesTheBytesOnTheWire) {
  const auto sent = [](World& world, std::optional<at::ScalarType> dtype) {
    constexpr int64_t kNumel = 6000;
    at::Tensor w = torch::zeros({kNumel}).requires_grad_();
    DataParallel dp({{"w", w}}, {}, world.comm(), {.reduce_dtype = dtype});
    const auto total = [&] {
      int64_t bytes = 0;
      for (const auto& [op, count] : world.comm().traffic()) bytes += count.sent;
      return bytes;
    };
    const int64_t before = total();
    w.sum().backward();
    return total() - before;
  };
  on_threads(3, [&](World& world) {
    const int64_t full = sent(world, std::nullopt), half = sent(world, at::kBFloat16);
    EXPECT_GT(full, 6000 * 4);
    EXPECT_NEAR(static_cast<double>(half) / static_cast<double>(full), 0.5, 0.01);
  });
}

TEST(ReduceDtype, TrainsCloseToOneRankAndExactlyInFp64) {
  const Trace reference = train(Comm(), {.adam = false});
  on_threads(3, [&](World& world) {
    EXPECT_LE(difference(train(world.comm(), {.adam = false, .options = {.reduce_dtype = at::kDouble}}), reference), testing::kFp64Parity);
    const DataParallelOptions low{.reduce_dtype = at::kBFloat16, .bucket = {.bytes = 64, .last_bytes = 8}};
    const double worst = difference(train(world.comm(), {.adam = false, .options = low}), reference);
    EXPECT_LE(worst, 0.05);  // 20 steps of relative error 2^-8 each, some of it against cancelling gradients
    EXPECT_GT(worst, 1e-4) << "nothing was rounded";
  });
}

TEST(ReduceDtype, WrongChoicesAreRefused) {
  EXPECT_THROW(reduce_as(at::kInt), ConfigError);
  on_threads(2, [](World& world) {
    torch::nn::Linear net(2, 1);
    EXPECT_THROW(DataParallel(net, world.comm(), {.reduce_dtype = at::kLong}), ConfigError);
    EXPECT_THROW(DataParallel(net, world.comm(), {.reduce_dtype = at::kBFloat16, .reduce_hook = reduce_as(at::kHalf)}), ConfigError);
  });
}

// A hook of one's own: signs with one magnitude per bucket (1-bit SGD without its error feedback).
TEST(ReduceHook, OfTheUsersOwnSeesEveryBucketInOrder) {
  on_threads(3, [](World& world) {
    std::vector<int64_t> started, finished;
    const ReduceHook hook = [&](const BucketReduction& call) -> std::function<void()> {
      EXPECT_EQ(call.op, ReduceOp::avg);
      started.push_back(call.bucket);
      const at::Tensor magnitude = call.gradients.abs().max();
      call.gradients.sign_().mul_(magnitude);
      auto work = std::make_shared<Work>(call.comm.all_reduce(call.gradients, call.op));
      return [&, work, bucket = call.bucket] {
        work->released();
        finished.push_back(bucket);
      };
    };
    torch::nn::Sequential net(torch::nn::Linear(3, 3), torch::nn::Linear(3, 1), torch::nn::Linear(7, 7));
    DataParallel dp(net, world.comm(), {.reduce_hook = hook, .bucket = {.bytes = 8, .last_bytes = 8}});
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      started.clear();
      finished.clear();
      net[1]->as<torch::nn::Linear>()->forward(net[0]->as<torch::nn::Linear>()->forward(torch::ones({1, 3}))).sum().backward();
      EXPECT_EQ(started, (std::vector<int64_t>{0, 1, 2, 3, 4, 5}));
      EXPECT_EQ(finished, started);
      EXPECT_FLOAT_EQ(net[1]->as<torch::nn::Linear>()->bias.grad().item<float>(), 1.0F);
      EXPECT_FALSE(net[2]->as<torch::nn::Linear>()->weight.grad().defined()) << "an unused parameter stays without gradient";
    }
  });
}

}  // namespace
}  // namespace weft
