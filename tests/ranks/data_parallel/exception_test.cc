// Backward that throws on some or all ranks: nothing hangs, all ranks agree that the step does not count, and training goes on.
#include "tests/support/problem.h"
#include "weft/core/error.h"

namespace weft {
namespace {

using testing::on_threads;

/// Identity whose backward throws.
struct Bomb : torch::autograd::Function<Bomb> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*, torch::autograd::tensor_list) {
    throw std::runtime_error("bomb");
  }
};

struct ChainImpl : torch::nn::Module {
  ChainImpl() {
    for (const char* name : {"a", "b", "c", "d"}) layers.push_back(register_parameter(name, torch::full({1}, 2.0, torch::kDouble)));
  }
  /// x a b c d; with a bomb before layer `bomb`, so that layers bomb .. 3 have their gradients when it goes off.
  at::Tensor forward(at::Tensor x, int bomb = -1) {
    for (int i = 0; i < 4; ++i) {
      if (i == bomb) x = Bomb::apply(x);
      x = x * layers[static_cast<size_t>(i)];
    }
    return x;
  }
  std::vector<at::Tensor> layers;
};
TORCH_MODULE(Chain);

constexpr int kNowhere = -1;

/// Input rank + 1: each gradient is 8 (rank + 1), their mean 4 (ranks + 1).
at::Tensor input(const World& world) { return torch::full({1}, world.rank() + 1.0, torch::kDouble).requires_grad_(); }

void expect_right_step(World& world, Chain& net) {
  net->zero_grad();
  net(input(world)).sum().backward();
  for (const at::Tensor& p : net->layers) {
    ASSERT_TRUE(p.grad().defined());
    EXPECT_DOUBLE_EQ(p.grad().item<double>(), 4.0 * (world.size() + 1)) << "rank " << world.rank();
  }
}

struct Case {
  const char* name;
  std::vector<int> failing;            ///< ranks; empty: all
  std::function<void(DataParallel&, Chain&)> handler;
};

class BackwardThrows : public ::testing::TestWithParam<std::tuple<int, int, bool, Case>> {};

TEST_P(BackwardThrows, TheStepCountsNowhereAndTheNextIsRight) {
  const auto& [ranks, bomb, overlap, test] = GetParam();
  on_threads(ranks, [&, bomb = bomb, overlap = overlap, &test = test](World& world) {
    const bool fails = test.failing.empty() || std::ranges::count(test.failing, world.rank()) > 0;
    Chain net;
    DataParallel dp(net.ptr(), world.comm(), {.bucket = {.bytes = 8, .last_bytes = 8}, .overlap = overlap});
    expect_right_step(world, net);
    net->zero_grad();
    try {
      net(input(world), fails ? bomb : kNowhere).sum().backward();
      ADD_FAILURE() << "rank " << world.rank() << " took the step";
    } catch (const CommError& error) {
      EXPECT_FALSE(fails);
      EXPECT_EQ(error.failure().peers, test.failing);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("backward threw there"));
    } catch (const std::runtime_error& error) {
      EXPECT_TRUE(fails);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("bomb"));
    }
    for (const at::Tensor& p : net->layers) EXPECT_FALSE(p.grad().defined()) << "gradients of a step that does not count";
    if (fails && test.handler) test.handler(dp, net);
    for (int step = 0; step < 2; ++step) expect_right_step(world, net);
    EXPECT_DOUBLE_EQ(dp.grad_norm(), 2 * 4.0 * (world.size() + 1));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Cells, BackwardThrows,
    ::testing::Combine(::testing::Values(2, 3), ::testing::Values(1, 3), ::testing::Bool(),
                       ::testing::Values(Case{"all_ranks", {}, {}}, Case{"last_rank", {1}, {}},
                                         Case{"first_rank_finishes", {0}, [](DataParallel& dp, Chain&) { dp.finish(); }},
                                         Case{"first_rank_joins", {0}, [](DataParallel& dp, Chain&) { dp.join_without_batch(); }},
                                         Case{"first_rank_asks_for_the_norm", {0}, [](DataParallel& dp, Chain&) { EXPECT_EQ(dp.grad_norm(), 0.0); }},
                                         Case{"two_ranks_zero", {0, 1}, [](DataParallel&, Chain& net) { net->zero_grad(/*set_to_none=*/false); }})),
    [](const auto& info) {
      return std::to_string(std::get<0>(info.param)) + "ranks_bomb" + std::to_string(std::get<1>(info.param)) +
             (std::get<2>(info.param) ? "_overlap_" : "_late_") + std::get<3>(info.param).name;
    });

TEST(BackwardThrows, OnGlooAsWell) {
  on_threads(3, [](World& world) {
    Chain net;
    DataParallel dp(net, world.comm(), {.bucket = {.bytes = 8, .last_bytes = 8}});
    for (const int failing : {2, 0}) {
      net->zero_grad();
      EXPECT_ANY_THROW(net(input(world), world.rank() == failing ? 2 : kNowhere).sum().backward());
      expect_right_step(world, net);
    }
  }, BackendKind::gloo);
}

// The exception comes out of a backward inside backward (recomputation).
TEST(BackwardThrows, InANestedBackward) {
  struct Nested : torch::autograd::Function<Nested> {
    // As recomputation does, it takes the module, not its parameters.
    static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, ChainImpl* net, bool bomb) {
      ctx->save_for_backward({x});
      ctx->saved_data["net"] = reinterpret_cast<int64_t>(net);
      ctx->saved_data["bomb"] = bomb;
      return x * net->layers[2];
    }
    static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::tensor_list grads) {
      const at::AutoGradMode enable(true);
      const at::Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_();
      (x * reinterpret_cast<ChainImpl*>(ctx->saved_data["net"].toInt())->layers[2]).backward(grads[0]);
      if (ctx->saved_data["bomb"].toBool()) throw std::runtime_error("bomb");
      return {x.grad(), at::Tensor(), at::Tensor()};
    }
  };
  on_threads(2, [](World& world) {
    Chain net;
    DataParallel dp(net, world.comm(), {.bucket = {.bytes = 8, .last_bytes = 8}});
    for (const bool bomb : {true, false, true, false}) {
      net->zero_grad();
      const auto step = [&] {
        at::Tensor x = input(world) * net->layers[0] * net->layers[1];
        x = Nested::apply(x, net.get(), bomb && world.rank() == 1);
        (x * net->layers[3]).sum().backward();
      };
      if (bomb) {
        EXPECT_ANY_THROW(step());
        continue;
      }
      step();
      for (const at::Tensor& p : net->layers) EXPECT_DOUBLE_EQ(p.grad().item<double>(), 12.0);
    }
  });
}

// The last gradient has landed everywhere when the bomb goes off: the step must still not count on the others.
TEST(BackwardThrows, AfterTheLastGradientItDoesNotCountEither) {
  on_threads(3, [](World& world) {
    Chain net;
    DataParallel dp(net.ptr(), world.comm(), {.bucket = {.bytes = 8, .last_bytes = 8}});
    at::Tensor x = input(world);
    if (world.rank() == 2) x = Bomb::apply(x);
    EXPECT_ANY_THROW(net(x).sum().backward());
    for (int step = 0; step < 2; ++step) expect_right_step(world, net);
  });
}

// Program 1's order: a collective of global_mean comes between the exception and the next backward.
TEST(BackwardThrows, GlobalMeanTellsThePeersFirst) {
  on_threads(3, [](World& world) {
    Chain net;
    DataParallel dp(net.ptr(), world.comm(), {.bucket = {.bytes = 8, .last_bytes = 8}});
    int good = 0;
    for (int step = 0; step < 4; ++step) {
      net->zero_grad();
      try {
        const at::Tensor sum = net(input(world), step == 1 && world.rank() == 0 ? 2 : kNowhere).sum();
        global_mean(sum, 1, dp).backward();
        EXPECT_DOUBLE_EQ(net->layers[0].grad().item<double>(), 16.0);  // (8 + 16 + 24) / 3
        ++good;
      } catch (const std::exception&) {
        EXPECT_EQ(step, 1);
      }
    }
    EXPECT_EQ(good, 3);
  });
}

TEST(BackwardThrows, DuringAccumulationTheStepStartsAgain) {
  on_threads(2, [](World& world) {
    Chain net;
    DataParallel dp(net.ptr(), world.comm(), {.bucket = {.bytes = 8, .last_bytes = 8}});
    for (const bool bomb : {true, false}) {
      net->zero_grad();
      dp.sync(false);
      net(input(world)).sum().backward();
      dp.sync(true);
      const auto last = [&] { net(input(world), bomb && world.rank() == 1 ? 2 : kNowhere).sum().backward(); };
      if (bomb) {
        EXPECT_ANY_THROW(last());
      } else {
        last();
        EXPECT_DOUBLE_EQ(net->layers[0].grad().item<double>(), 2 * 4.0 * 3);
      }
    }
  });
}

// A rank that finds a fault of its own in a hook (here: storage that was replaced) tells the others as well.
TEST(BackwardThrows, AFaultFoundOnOneRankReachesTheOthers) {
  on_threads(3, [](World& world) {
    Chain net;
    DataParallel dp(net.ptr(), world.comm());
    if (world.rank() == 1) net->layers[3].set_data(net->layers[3].detach().clone());
    try {
      net(input(world)).sum().backward();
      ADD_FAILURE() << "not noticed";
    } catch (const ConfigError& error) {
      EXPECT_EQ(world.rank(), 1);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("was given other storage"));
      dp.finish();
    } catch (const CommError& error) {
      EXPECT_NE(world.rank(), 1);
      EXPECT_EQ(error.failure().peers, std::vector<int>{1});
    }
  });
}

// A forward that throws has opened nothing; the handler takes part without a batch.
TEST(ForwardThrows, TheRankJoinsWithoutBatch) {
  on_threads(2, [](World& world) {
    Chain net;
    DataParallel dp(net.ptr(), world.comm());
    if (world.rank() == 1) {
      EXPECT_ANY_THROW(net(torch::ones({2, 3}).matmul(torch::ones({2, 3}))));
      dp.join_without_batch();
    } else {
      net(input(world)).sum().backward();
    }
    EXPECT_DOUBLE_EQ(net->layers[0].grad().item<double>(), 4.0);
    expect_right_step(world, net);
  });
}

}  // namespace
}  // namespace weft
