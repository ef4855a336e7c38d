// What goes wrong on some ranks counts on none, at every position of the dial: exceptions in backward, in hooks and in forward.
// Nothing hangs, and training goes on.
#include "tests/ranks/sharding/factors.h"
#include "weft/core/error.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using testing::Dial;
using testing::expect_gradients;
using testing::expect_no_gradients;
using testing::expect_right_step;
using testing::factor_loss;
using testing::Factors;
using testing::forget_step;
using testing::kDials;
using testing::kNowhere;
using testing::on_threads;

/// A backward of a step that must not count: ranks in `failing` see their own exception, the others an error that names those.
void expect_refused(World& world, const std::vector<int>& failing, const std::string& own, const std::string& where,
                    const std::function<void()>& step) {
  const bool fails = std::ranges::count(failing, world.rank()) > 0;
  try {
    step();
    ADD_FAILURE() << "rank " << world.rank() << " took the step, " << where;
  } catch (const CommError& error) {
    EXPECT_FALSE(fails) << where << ": " << error.what();
    EXPECT_EQ(error.failure().peers, failing) << where << ": " << error.what();
    EXPECT_THAT(error.what(), HasSubstr("backward threw there")) << where;
  } catch (const std::exception& error) {
    EXPECT_TRUE(fails) << where << ": " << error.what();
    EXPECT_THAT(error.what(), HasSubstr(own)) << where;
  }
}

std::vector<int> all_of(int ranks) {
  std::vector<int> all;
  for (int r = 0; r < ranks; ++r) all.push_back(r);
  return all;
}

struct Case {
  const char* name;
  std::vector<int> failing;  ///< ranks; empty: all
  std::function<void(DataParallel&, Factors&)> handler;
};

const std::vector<Case> kCases{
    {"all_ranks", {}, {}},
    {"last_rank", {1}, {}},
    {"first_rank_finishes", {0}, [](DataParallel& dp, Factors&) { dp.finish(); }},
    {"first_rank_joins", {0}, [](DataParallel& dp, Factors&) { dp.join_without_batch(); }},
    {"first_rank_asks_for_the_norm", {0}, [](DataParallel& dp, Factors&) {
       // Of shards, the norm is collective, and the peers do not ask for it.
       if (dp.options().sharding != Sharding::none) return dp.finish();
       EXPECT_EQ(dp.grad_norm(), 0.0);
     }},
    {"two_ranks_zero", {0, 1}, [](DataParallel&, Factors& net) { net->zero_grad(/*set_to_none=*/false); }},
};

class BackwardThrows : public ::testing::TestWithParam<std::tuple<Dial, Case>> {};

std::string name_of(const ::testing::TestParamInfo<std::tuple<Dial, Case>>& info) {
  return std::string(std::get<0>(info.param).name) + "_" + std::get<1>(info.param).name;
}

TEST_P(BackwardThrows, TheStepCountsNowhereAndTheNextIsRight) {
  const auto& [dial, test] = GetParam();
  for (const int ranks : {2, 3}) {
    on_threads(ranks, [&, &dial = dial, &test = test](World& world) {
      const std::vector<int> failing = test.failing.empty() ? all_of(ranks) : test.failing;
      const bool fails = std::ranges::count(failing, world.rank()) > 0;
      for (const bool overlap : {true, false}) {
        // Another order than that of registration needs a second pass of gathers in backward, after the bomb.
        for (const std::vector<int>& order : {std::vector<int>{0, 1, 2, 3}, std::vector<int>{3, 0, 1, 2}}) {
          Factors net;
          net->order = order;
          DataParallel dp(net, world.comm(), testing::options_of(dial, overlap));
          expect_right_step(world, net, dp, "before");
          for (const int bomb : {4, 3, 1, 0}) {
            const std::string where = "bomb at " + std::to_string(bomb) + (overlap ? ", overlap" : "") + (order[0] == 0 ? "" : ", other order");
            forget_step(dp);
            expect_refused(world, failing, "bomb", where, [&] { factor_loss(net, world, dp, fails ? bomb : kNowhere).backward(); });
            expect_no_gradients(dp, where);
            if (fails && test.handler) test.handler(dp, net);
            for (int step = 0; step < 2; ++step) expect_right_step(world, net, dp, where);
            EXPECT_NEAR(dp.grad_norm(), testing::mean_gradient(world) * std::sqrt(4.0 * testing::kElements), 1e-9);
          }
        }
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Cells, BackwardThrows, ::testing::Combine(::testing::ValuesIn(kDials), ::testing::ValuesIn(kCases)), name_of);

class Failure : public ::testing::TestWithParam<Dial> {};
INSTANTIATE_TEST_SUITE_P(Dials, Failure, ::testing::ValuesIn(kDials), [](const auto& info) { return info.param.name; });

// A micro-step whose gradients are not reduced throws: the peers learn it at the end of the step.
TEST_P(Failure, AnExceptionDuringAccumulationMakesTheStepCountNowhere) {
  constexpr int kMicroSteps = 3;
  for (const int failing_step : {0, 1, 2}) {
    on_threads(3, [&](World& world) {
      Factors net;
      DataParallel dp(net, world.comm(), testing::options_of(GetParam()));
      const auto accumulate = [&](int bomb_at) {
        for (int k = 0; k < kMicroSteps; ++k) {
          dp.sync(k + 1 == kMicroSteps);
          factor_loss(net, world, dp, k == bomb_at ? 2 : kNowhere).backward();
        }
      };
      const std::string where = "micro-step " + std::to_string(failing_step);
      expect_refused(world, {1}, "bomb", where, [&] { accumulate(world.rank() == 1 ? failing_step : kNowhere); });
      for (int step = 0; step < 2; ++step) {
        forget_step(dp);
        accumulate(kNowhere);
        expect_gradients(dp, kMicroSteps * testing::mean_gradient(world), where);
      }
    });
  }
}

// Reduced gradients of earlier micro-steps go as well.
TEST_P(Failure, AnExceptionAfterReducedMicroStepsDropsThoseToo) {
  on_threads(2, [&](World& world) {
    Factors net;
    DataParallel dp(net, world.comm(), testing::options_of(GetParam()));
    for (const bool bomb : {true, false}) {
      forget_step(dp);
      factor_loss(net, world, dp).backward();
      dp.continue_accumulation();
      const auto second = [&] { factor_loss(net, world, dp, bomb && world.rank() == 1 ? 2 : kNowhere).backward(); };
      if (bomb) {
        expect_refused(world, {1}, "bomb", "second micro-step", second);
        expect_no_gradients(dp, "after the bomb");
        continue;
      }
      second();
      expect_gradients(dp, 2 * testing::mean_gradient(world), "both micro-steps");
    }
  });
}

// Program 1's order: a collective of global_mean comes between the exception and the next backward.
TEST_P(Failure, GlobalMeanTellsThePeersFirst) {
  on_threads(3, [&](World& world) {
    Factors net;
    DataParallel dp(net, world.comm(), testing::options_of(GetParam()));
    int good = 0;
    for (int step = 0; step < 4; ++step) {
      forget_step(dp);
      try {
        const at::Tensor sum = net(testing::input_of(world), step == 1 && world.rank() == 0 ? 2 : kNowhere).sum();
        global_mean(sum, 1, dp).backward();
        expect_gradients(dp, 16, "a good step");  // (8 + 16 + 24) / 3
        ++good;
      } catch (const std::exception&) {
        EXPECT_EQ(step, 1);
      }
    }
    EXPECT_EQ(good, 3);
  });
}

// The program's own hook, which was there before, throws.
TEST_P(Failure, AHookThatThrows) {
  struct Hook : torch::autograd::PostAccumulateGradHook {
    explicit Hook(bool& armed) : armed(armed) {}
    void operator()(const at::Tensor&) override {
      if (std::exchange(armed, false)) throw std::runtime_error("the program's hook");
    }
    bool& armed;
  };
  on_threads(3, [&](World& world) {
    bool armed = false;
    Factors net;
    torch::autograd::impl::set_post_acc_grad_hooks(net->factors[1]->w, std::make_unique<Hook>(armed));
    DataParallel dp(net, world.comm(), testing::options_of(GetParam()));
    for (int round = 0; round < 2; ++round) {
      expect_right_step(world, net, dp, "before");
      forget_step(dp);
      armed = world.rank() == 2;
      expect_refused(world, {2}, "the program's hook", "hook", [&] { factor_loss(net, world, dp).backward(); });
    }
    expect_right_step(world, net, dp, "after");
  });
}

// How gradients are reduced may be the program's own, and may throw when a collective is launched (zero = 0 only).
TEST(ReduceHookThrows, TheStepCountsNowhere) {
  for (const bool overlap : {true, false}) {
    on_threads(3, [&](World& world) {
      bool armed = false;
      Factors net;
      DataParallelOptions options = testing::options_of(kDials[0], overlap);
      options.reduce_hook = [&](const BucketReduction& bucket) {
        if (std::exchange(armed, false)) throw std::runtime_error("cannot compress");
        Work work = bucket.comm.all_reduce(bucket.gradients, bucket.op);
        return [work]() mutable { work.released(); };
      };
      DataParallel dp(net, world.comm(), options);
      for (int round = 0; round < 2; ++round) {
        expect_right_step(world, net, dp, "before");
        forget_step(dp);
        armed = world.rank() == 1;
        expect_refused(world, {1}, "cannot compress", "reduce hook", [&] { factor_loss(net, world, dp).backward(); });
      }
      expect_right_step(world, net, dp, "after");
    });
  }
}

// Forward throws inside a Unit, or between two of them: the others' step counts.
TEST_P(Failure, AForwardThatThrowsJoinsWithoutBatch) {
  for (const int fail : {0, 2}) {
    on_threads(3, [&](World& world) {
      Factors net;
      DataParallel dp(net, world.comm(), testing::options_of(GetParam()));
      for (const bool between : {false, true}) {
        forget_step(dp);
        if (world.rank() == 1) {
          if (between) {
            net->factors[0]->forward(testing::input_of(world), false);
            net->factors[1]->forward(testing::input_of(world), false);
          } else {
            EXPECT_ANY_THROW(net(testing::input_of(world), kNowhere, fail));
          }
          dp.join_without_batch();
        } else {
          factor_loss(net, world, dp).backward();
        }
        expect_gradients(dp, (8.0 + 24.0) / 3, "rank 1 has no part");
        expect_right_step(world, net, dp, "after");
      }
    });
  }
}

// One rank tries again, in more forward passes than the others.
TEST_P(Failure, AForwardThatIsRepeatedOnOneRank) {
  on_threads(3, [&](World& world) {
    Factors net;
    DataParallel dp(net, world.comm(), testing::options_of(GetParam()));
    for (int step = 0; step < 2; ++step) {
      forget_step(dp);
      if (world.rank() == 1) {
        EXPECT_ANY_THROW(net(testing::input_of(world), kNowhere, 2));
        EXPECT_ANY_THROW(net(testing::input_of(world), kNowhere, 0));
      }
      if (world.rank() == 2) {
        const at::NoGradGuard no_grad;
        EXPECT_EQ(net(torch::ones({testing::kElements}, torch::kDouble))[0].item<double>(), 16.0);
      }
      expect_right_step(world, net, dp, "after other numbers of forward passes");
    }
  });
}

// join_without_batch() stands in for all that the others do until their synchronised backward ends.
TEST_P(Failure, JoinStandsInForEveryMicroStep) {
  on_threads(3, [&](World& world) {
    Factors net;
    DataParallel dp(net, world.comm(), testing::options_of(GetParam()));
    for (int step = 0; step < 2; ++step) {
      forget_step(dp);
      if (world.rank() == 0) {
        dp.sync(true);
        dp.join_without_batch();
      } else {
        for (int k = 0; k < 3; ++k) {
          dp.sync(k == 2);
          net->order = k == 1 ? std::vector<int>{3, 1, 0, 2} : std::vector<int>{0, 1, 2, 3};
          factor_loss(net, world, dp).backward();
        }
      }
      expect_gradients(dp, 3 * (16.0 + 24.0) / 3, "rank 0 has no part");
    }
    // Or micro-step by micro-step, beside a rank that always has a batch.
    forget_step(dp);
    for (int k = 0; k < 3; ++k) {
      dp.sync(k == 2);
      world.rank() == k ? dp.join_without_batch() : factor_loss(net, world, dp).backward();
    }
    expect_gradients(dp, 2 * (8.0 + 16.0 + 24.0) / 3, "each rank missed one");
  });
}

}  // namespace
}  // namespace weft
