// Loaders agree on the number of steps, read every sample once, and resume from one integer on any number of ranks.
#include "weft/data/loader.h"

#include <mutex>
#include <numeric>
#include <set>
#include <torch/data.h>

#include "tests/support/ranks.h"
#include "tests/support/test_pch.h"
#include "weft/core/error.h"
#include "weft/parallel/data_parallel.h"

namespace weft::data {
namespace {

using testing::on_threads;

/// Sample i is the number i.
struct Numbers : torch::data::datasets::Dataset<Numbers, torch::data::Example<>> {
  explicit Numbers(size_t n) : n(n) {}
  torch::data::Example<> get(size_t i) override {
    const at::Tensor x = torch::full({1}, static_cast<double>(i), torch::kDouble);
    return {x, x * 2};
  }
  std::optional<size_t> size() const override { return n; }
  size_t n;
};

auto stacked(size_t n) { return Numbers(n).map(torch::data::transforms::Stack<>()); }

/// What all ranks read, gathered under a lock.
struct Seen {
  std::mutex mutex;
  std::multiset<int64_t> samples;
  std::set<int64_t> steps;
  void add(const Rows& rows) {
    const std::lock_guard lock(mutex);
    for (const size_t row : rows) samples.insert(static_cast<int64_t>(row));
  }
};

std::multiset<int64_t> each_once(int64_t n) {
  std::multiset<int64_t> all;
  for (int64_t i = 0; i < n; ++i) all.insert(i);
  return all;
}

TEST(LoaderTest, EverySampleOnceAndTheSameNumberOfStepsOnEveryRank) {
  for (const auto& [samples, ranks, batch] : std::vector<std::tuple<int64_t, int, int64_t>>{{13, 3, 2}, {12, 2, 3}, {5, 4, 4}, {1, 3, 1}}) {
    Seen seen;
    on_threads(ranks, [&, samples = samples, batch = batch](World& world) {
      StepPlan plan(samples, world.comm(), {.batch = batch, .seed = 4});
      int64_t steps = 0;
      while (const auto rows = plan.next()) {
        seen.add(*rows);
        ++steps;
      }
      EXPECT_EQ(steps, plan.steps_per_epoch());
      const std::lock_guard lock(seen.mutex);
      seen.steps.insert(steps);
    });
    EXPECT_EQ(seen.samples, each_once(samples));
    EXPECT_EQ(seen.steps.size(), 1U);
  }
}

TEST(LoaderTest, EpochsDifferAndDependOnTheSeedAlone) {
  const auto epoch = [](StepPlan& plan) {
    Rows order;
    while (const auto rows = plan.next()) order.insert(order.end(), rows->begin(), rows->end());
    return order;
  };
  StepPlan a(40, Comm(), {.batch = 8, .seed = 1}), again(40, Comm(), {.batch = 8, .seed = 1}), other(40, Comm(), {.batch = 8, .seed = 2});
  const Rows first = epoch(a), second = epoch(a);
  EXPECT_NE(first, second);
  EXPECT_EQ(first, epoch(again));
  EXPECT_EQ(second, epoch(again));
  EXPECT_NE(first, epoch(other));
}

// Fault class "elastic mid-epoch resume": 12 samples, 3 ranks x 1, 2 steps done, resume on 2 ranks.
TEST(LoaderTest, AnotherNumberOfRanksReadsTheRestOnce) {
  Seen seen;
  std::atomic<int64_t> position{0};
  on_threads(3, [&](World& world) {
    StepPlan plan(12, world.comm(), {.batch = 1, .seed = 9});
    for (int step = 0; step < 2; ++step) seen.add(*plan.next());
    position = plan.position();
  });
  EXPECT_EQ(position, 6);
  on_threads(2, [&](World& world) {
    StepPlan plan(12, world.comm(), {.batch = 1, .seed = 9});
    plan.seek(position);
    while (const auto rows = plan.next()) seen.add(*rows);
  });
  EXPECT_EQ(seen.samples, each_once(12));
}

// Fault classes "second resume in one epoch" and "saving exactly at the end of an epoch".
TEST(LoaderTest, ResumingTwiceContinuesAtTheNextSample) {
  StepPlan whole(100, Comm(), {.batch = 1, .seed = 3});
  Rows order;
  for (int epoch = 0; epoch < 2; ++epoch) {
    while (const auto rows = whole.next()) order.push_back(rows->front());
  }
  int64_t position = 0;
  Rows resumed;
  for (const int count : {30, 10, 60, 25}) {
    StepPlan plan(100, Comm(), {.batch = 1, .seed = 3});
    plan.seek(position);
    for (int i = 0; i < count; ++i) resumed.push_back(plan.next()->front());
    position = plan.position();
  }
  order.resize(resumed.size());
  EXPECT_EQ(resumed, order);
}

TEST(LoaderTest, OwnShardsOfUnequalLengthEndTogether) {
  Seen seen;
  on_threads(3, [&](World& world) {
    StepPlan plan(world.rank() == 1 ? 7 : 2, world.comm(), {.batch = 2, .seed = 1, .own_shard = true});
    for (int epoch = 0; epoch < 2; ++epoch) {
      int64_t steps = 0, rows_read = 0;
      while (const auto rows = plan.next()) {
        ++steps;
        rows_read += static_cast<int64_t>(rows->size());
      }
      EXPECT_EQ(steps, 4);
      EXPECT_EQ(rows_read, world.rank() == 1 ? 7 : 2);
    }
  });
}

TEST(LoaderTest, DropLastLeavesOutTheUnevenStep) {
  StepPlan plan(10, Comm(), {.batch = 4, .drop_last = true});
  for (int epoch = 0; epoch < 3; ++epoch) {
    int steps = 0;
    while (plan.next()) ++steps;
    EXPECT_EQ(steps, 2);
  }
}

// Fault class "ranks run out of data at different times": 3 ranks, 7 samples. The rank with no rows joins with weight 0.
TEST(LoaderTest, AnUnevenEpochTrainsToTheOneRankResult) {
  const auto train = [](const Comm& comm) {
    at::Tensor w = torch::zeros({1}, torch::kDouble).requires_grad_();
    DataParallel dp({{"w", w}}, {}, comm);
    torch::optim::SGD optimizer({w}, 0.01);
    auto data = loader(stacked(7), comm, {.batch = 6 / comm.size(), .seed = 1});
    int steps = 0;
    for (int epoch = 0; epoch < 3; ++epoch) {
      for (auto& batch : *data) {
        optimizer.zero_grad();
        const at::Tensor loss_sum = (w * batch.data - batch.target).square().sum();
        global_mean(loss_sum, batch.data.size(0), dp).backward();
        optimizer.step();
        ++steps;
      }
    }
    EXPECT_EQ(steps, 6);
    return w.item<double>();
  };
  const double reference = train(Comm());
  EXPECT_GT(reference, 0.1);
  on_threads(3, [&](World& world) { EXPECT_NEAR(train(world.comm()), reference, 1e-12 * reference); });
}

// Rank 0 holds 8 batches, rank 1 holds 7: both take 8 steps, and rank 1's last one weighs nothing.
TEST(LoaderTest, RanksWithUnequalShardsTrainToTheOneRankResult) {
  const auto epoch = [](auto& data, DataParallel& dp, at::Tensor& w) {
    torch::optim::SGD optimizer({w}, 0.01);
    int steps = 0;
    for (auto& batch : data) {
      optimizer.zero_grad();
      global_mean((w * batch.data - batch.target).square().sum(), batch.data.size(0), dp).backward();
      optimizer.step();
      ++steps;
    }
    return steps;
  };
  at::Tensor expected = torch::zeros({1}, torch::kDouble);
  for (int64_t step = 0; step < 8; ++step) {  // by hand: both ranks read 0 .. 7 in order, rank 1 has no row 7
    const double x = static_cast<double>(step), gradient = 2 * (expected.item<double>() * x - 2 * x) * x;
    expected -= 0.01 * gradient;
  }
  on_threads(2, [&](World& world) {
    at::Tensor w = torch::zeros({1}, torch::kDouble).requires_grad_();
    DataParallel dp({{"w", w}}, {}, world.comm());
    auto data = loader(stacked(world.rank() == 0 ? 8 : 7), world.comm(), {.batch = 1, .shuffle = false, .own_shard = true});
    EXPECT_EQ(epoch(*data, dp, w), 8);
    EXPECT_NEAR(w.item<double>(), expected.item<double>(), 1e-12);
    EXPECT_GT(w.item<double>(), 0.5);
    const int64_t position = data->position();
    data->seek(3);
    EXPECT_EQ(epoch(*data, dp, w), 5);
    EXPECT_EQ(data->position(), position);
  });
}

// 5 samples on 2 ranks, of which sample 0 is judged wrong: 4 of 5 are right, none counts twice.
TEST(LoaderTest, EvaluationCountsEverySampleOnce) {
  on_threads(2, [](World& world) {
    auto data = loader(stacked(5), world.comm(), {.batch = 2, .shuffle = false});
    at::Tensor counts = torch::zeros({2}, torch::kLong);  // right, all
    for (auto& batch : *data) counts += torch::stack({(batch.data > 0).sum(), torch::tensor(batch.data.size(0))});
    world.comm().all_reduce(counts).wait();
    EXPECT_EQ(counts[0].item<int64_t>(), 4);
    EXPECT_EQ(counts[1].item<int64_t>(), 5);
  });
}

TEST(DistributedSamplerTest, FeedsTorchsDataLoaderAndSavesItsState) {
  Seen seen;
  on_threads(2, [&](World& world) {
    auto data = torch::data::make_data_loader(stacked(12), DistributedSampler(12, world.comm(), {.batch = 3, .seed = 2}), 3);
    for (auto& batch : *data) {
      const at::Tensor values = batch.data.view(-1).to(torch::kLong);
      seen.add(Rows(values.data_ptr<int64_t>(), values.data_ptr<int64_t>() + values.numel()));
    }
  });
  EXPECT_EQ(seen.samples, each_once(12));
  DistributedSampler first(10, Comm(), {.batch = 2, .seed = 5}), second(10, Comm(), {.batch = 2, .seed = 5});
  first.next(2);
  std::stringstream file;
  torch::serialize::OutputArchive out;
  first.save(out);
  out.save_to(file);
  torch::serialize::InputArchive in;
  in.load_from(file);
  second.load(in);
  EXPECT_EQ(*second.next(2), *first.next(2));
  EXPECT_THROW(first.next(3), ConfigError);
}

TEST(LoaderTest, BadArgumentsAreErrors) {
  EXPECT_THROW(StepPlan(10, Comm(), {.batch = 0}), ConfigError);
  EXPECT_THROW(StepPlan(0, Comm(), {}), ConfigError);
  EXPECT_THROW(StepPlan(5, Comm(), {}).seek(-1), ConfigError);
}

}  // namespace
}  // namespace weft::data
