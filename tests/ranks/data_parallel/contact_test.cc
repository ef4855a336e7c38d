// DataParallel beside ordinary libtorch code: what users do to modules, gradients and graphs.
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>

#include "tests/support/problem.h"
#include "tests/support/tolerances.h"
#include "weft/core/error.h"

namespace weft {
namespace {

using testing::on_threads;

at::Tensor rank_row(const World& world, int64_t columns) { return torch::full({1, columns}, world.rank() + 1.0, torch::kDouble); }

struct TwoBranchesImpl : torch::nn::Module {
  TwoBranchesImpl() {
    torch::manual_seed(1);
    a = register_module("a", torch::nn::Linear(2, 1));
    b = register_module("b", torch::nn::Linear(2, 1));
    never = register_module("never", torch::nn::Linear(2, 1));
    to(torch::kDouble);
  }
  torch::nn::Linear a{nullptr}, b{nullptr}, never{nullptr};
};
TORCH_MODULE(TwoBranches);

// Fault classes "a parameter used on no rank" and "used on some ranks only; None against zero".
TEST(Participation, BranchesOfSomeRanksAreAveragedAndUnusedOnesStayUndefined) {
  for (const bool overlap : {true, false}) {
    on_threads(2, [&](World& world) {
      TwoBranches net;
      DataParallel dp(net.ptr(), world.comm(), {.bucket = {.bytes = 8, .last_bytes = 8}, .overlap = overlap});
      torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.1).weight_decay(0.5));
      const at::Tensor before = net->never->weight.detach().clone();
      for (int step = 0; step < 3; ++step) {
        step % 2 == 0 ? optimizer.zero_grad() : optimizer.zero_grad(/*set_to_none=*/false);
        (world.rank() == 0 ? net->a(rank_row(world, 2)) : net->b(rank_row(world, 2))).sum().backward();
        EXPECT_TRUE(torch::allclose(net->a->weight.grad(), torch::full({1, 2}, 0.5, torch::kDouble)));
        EXPECT_TRUE(torch::allclose(net->b->weight.grad(), torch::full({1, 2}, 1.0, torch::kDouble)));
        EXPECT_FALSE(net->never->weight.grad().defined());
        optimizer.step();
      }
      EXPECT_TRUE(at::equal(net->never->weight.detach(), before)) << "decay must not touch an unused parameter";
    });
  }
}

TEST(Participation, ARankWithoutBatchJoinsWithZeros) {
  on_threads(3, [](World& world) {
    torch::nn::Linear net(2, 1);
    net->to(torch::kDouble);
    DataParallel dp(net.ptr(), world.comm());
    if (world.rank() == 2) {
      dp.join_without_batch();
    } else {
      net(rank_row(world, 2)).sum().backward();
    }
    EXPECT_TRUE(torch::allclose(net->weight.grad(), torch::full({1, 2}, 1.0, torch::kDouble)));  // (1 + 2 + 0) / 3
  });
}

// Fault class "ranks built different models".
TEST(Construction, DifferentModelsFailOnEveryRankWithTheFirstDifference) {
  on_threads(3, [](World& world) {
    torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::Linear(2, world.rank() == 1 ? 3 : 2));
    try {
      DataParallel dp(net.ptr(), world.comm());
      ADD_FAILURE() << "rank " << world.rank() << " did not notice";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("'1.weight' [2, 2] Float on rank 0"));
      EXPECT_THAT(error.what(), ::testing::HasSubstr("[3, 2]"));
    }
  });
  on_threads(2, [](World& world) {
    torch::nn::Sequential net(torch::nn::Linear(2, 2));
    if (world.rank() == 1) net->push_back(torch::nn::Linear(2, 2));
    EXPECT_THROW(DataParallel(net.ptr(), world.comm()), ConfigError);
  });
}

TEST(Construction, EveryParameterAndBufferEqualsTheFirstRanks) {
  on_threads(3, [](World& world) {
    torch::nn::Sequential net(torch::nn::Linear(3, 3), torch::nn::BatchNorm1d(3));
    net[0]->as<torch::nn::Linear>()->bias.set_requires_grad(false);
    {
      const at::NoGradGuard no_grad;
      for (auto& p : net->parameters()) p.fill_(world.rank() + 5);
      for (auto& b : net->buffers()) b.fill_(world.rank() + 5);
    }
    DataParallel dp(net.ptr(), world.comm());
    for (const auto& p : net->parameters()) EXPECT_TRUE(at::equal(p.detach(), at::full_like(p.detach(), 5)));
    for (const auto& b : net->buffers()) EXPECT_TRUE(at::equal(b, at::full_like(b, 5)));
  });
}

TEST(Construction, ASecondWrapperIsRefusedAndADestroyedOneLeavesNoTrace) {
  on_threads(2, [](World& world) {
    torch::nn::Linear net(2, 1);
    {
      DataParallel dp(net.ptr(), world.comm());
      EXPECT_THROW(DataParallel(net.ptr(), world.comm()), ConfigError);
    }
    net(torch::full({1, 2}, world.rank() + 1.0)).sum().backward();
    EXPECT_EQ(net->weight.grad()[0][0].item<float>(), world.rank() + 1.0F) << "a dead wrapper reduced";
    net->zero_grad();
    DataParallel again(net.ptr(), world.comm());
    DataParallel moved = std::move(again);
    net(torch::full({1, 2}, world.rank() + 1.0)).sum().backward();
    EXPECT_EQ(net->weight.grad()[0][0].item<float>(), 1.5F);
  });
}

TEST(Construction, TakesHoldersAndTorchScriptModules) {
  on_threads(3, [](World& world) {
    TwoBranches holder;
    DataParallel first(holder, world.comm());
    holder->a(rank_row(world, 2)).sum().backward();
    EXPECT_DOUBLE_EQ(holder->a->weight.grad()[0][0].item<double>(), 2.0);

    torch::jit::Module script("script");
    script.register_parameter("w", torch::full({2}, world.rank() + 3.0, torch::kDouble).requires_grad_(), /*is_buffer=*/false);
    script.register_buffer("shift", torch::full({2}, world.rank() + 7.0, torch::kDouble));
    script.define("def forward(self, x):\n    return x * self.w + self.shift\n");
    DataParallel second(script, world.comm());
    EXPECT_EQ(second.parameters().at(0).name, "w");
    const at::Tensor out = script.forward({rank_row(world, 2)}).toTensor();
    EXPECT_DOUBLE_EQ(out[0][0].item<double>(), 3.0 * (world.rank() + 1) + 7.0);
    out.sum().backward();
    EXPECT_DOUBLE_EQ(script.attr("w").toTensor().grad()[0].item<double>(), 2.0);
  });
}

struct CountingHook : torch::autograd::PostAccumulateGradHook {
  explicit CountingHook(int& count) : count(count) {}
  void operator()(const at::Tensor&) override { ++count; }
  int& count;
};

TEST(Hooks, AnEarlierHookRunsFirstAndIsPutBack) {
  on_threads(2, [](World& world) {
    int calls = 0;
    torch::nn::Linear net(2, 1);
    torch::autograd::impl::set_post_acc_grad_hooks(net->weight, std::make_unique<CountingHook>(calls));
    {
      DataParallel dp(net.ptr(), world.comm());
      net(torch::ones({1, 2})).sum().backward();
      EXPECT_EQ(calls, 1);
    }
    net(torch::ones({1, 2})).sum().backward();
    EXPECT_EQ(calls, 2);
  });
}

TEST(Storage, ReplacedByToAfterWrappingIsNamed) {
  on_threads(2, [](World& world) {
    torch::nn::Linear net(2, 1);
    DataParallel dp(net.ptr(), world.comm());
    net->to(torch::kDouble);
    try {
      net(torch::ones({1, 2}, torch::kDouble)).sum().backward();
      ADD_FAILURE() << "not noticed";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("was given other storage"));
    }
  });
}

TEST(Storage, GradientsStayInTheirFlatBufferOverSteps) {
  on_threads(2, [](World& world) {
    testing::Net net = testing::make_net();
    DataParallel dp(net.ptr(), world.comm());
    std::vector<const void*> first;
    for (int step = 0; step < 4; ++step) {
      if (step % 2 == 1) net->zero_grad(); else net->zero_grad(/*set_to_none=*/false);
      net(torch::ones({2, 6})).sum().backward();
      std::vector<const void*> now;
      for (const auto& p : net->parameters()) now.push_back(p.grad().const_data_ptr());
      if (step == 0) first = now;
      EXPECT_EQ(now, first);
    }
  });
}

// All forms of several backward calls: the sum over calls of the mean over ranks.
TEST(Backward, SeveralCallsInOneStepAddUp) {
  on_threads(3, [](World& world) {
    torch::nn::Linear net(2, 1);
    net->to(torch::kDouble);
    DataParallel dp(net.ptr(), world.comm());
    const at::Tensor expected = torch::full({1, 2}, 2.0 + 2.0 * 2.0, torch::kDouble);  // mean(1,2,3) + 2 mean(1,2,3)
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      const at::Tensor y = net(rank_row(world, 2)).sum();
      y.backward({}, /*retain_graph=*/true);
      (2 * y).backward();
      EXPECT_TRUE(torch::allclose(net->weight.grad(), expected));
      net->zero_grad();
      dp.sync(false);
      net(rank_row(world, 2)).sum().backward();
      dp.sync(true);
      (2 * net(rank_row(world, 2)).sum()).backward();
      EXPECT_TRUE(torch::allclose(net->weight.grad(), expected));
    }
  });
}

TEST(Backward, SumCannotAddToAReducedGradient) {
  on_threads(2, [](World& world) {
    torch::nn::Linear net(2, 1);
    DataParallel dp(net.ptr(), world.comm(), {.grad_scale = GradScale::sum});
    net(torch::ones({1, 2})).sum().backward();
    EXPECT_THROW(net(torch::ones({1, 2})).sum().backward(), ConfigError);
    net->zero_grad();
    net(torch::full({1, 2}, world.rank() + 1.0)).sum().backward();
    EXPECT_EQ(net->weight.grad()[0][0].item<float>(), 3.0F);
  });
}

// Reentrant recomputation: the block runs again inside backward, in a backward of its own.
struct Recomputed : torch::autograd::Function<Recomputed> {
  // `weight`: of the block, passed as some programs do though backward gives it nothing.
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, at::Tensor x, torch::nn::Module* block, at::Tensor weight) {
    ctx->save_for_backward({x});
    ctx->saved_data["block"] = reinterpret_cast<int64_t>(block);
    const at::NoGradGuard no_grad;
    return block->as<torch::nn::LinearImpl>()->forward(x);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::tensor_list grads) {
    auto* block = reinterpret_cast<torch::nn::Module*>(ctx->saved_data["block"].toInt());
    const at::AutoGradMode enable(true);
    const at::Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_();
    block->as<torch::nn::LinearImpl>()->forward(x).backward(grads[0]);
    return {x.grad(), at::Tensor(), at::Tensor()};
  }
};

TEST(Backward, ANestedBackwardDoesNotEndTheRound) {
  on_threads(2, [](World& world) {
    torch::manual_seed(5);
    torch::nn::Sequential net(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3), torch::nn::Linear(3, 1));
    net->to(torch::kDouble);
    const auto gradients = [&](bool recompute, bool with_weight = false) {
      net->zero_grad();
      at::Tensor x = net[0]->as<torch::nn::Linear>()->forward(rank_row(world, 3));
      const at::Tensor weight = with_weight ? net[1]->as<torch::nn::Linear>()->weight : torch::zeros({});
      x = recompute ? Recomputed::apply(x, net[1].get(), weight) : net[1]->as<torch::nn::Linear>()->forward(x);
      net[2]->as<torch::nn::Linear>()->forward(x).sum().backward();
      std::vector<at::Tensor> list;
      for (const auto& p : net->parameters()) list.push_back(p.grad().clone());
      return list;
    };
    DataParallel dp(net.ptr(), world.comm(), {.bucket = {.bytes = 8, .last_bytes = 8}});
    const auto plain = gradients(false), nested = gradients(true), with_weight = gradients(true, true);
    for (size_t i = 0; i < plain.size(); ++i) {
      EXPECT_TRUE(torch::allclose(nested[i], plain[i], 1e-12, 1e-14)) << i;
      EXPECT_TRUE(torch::allclose(with_weight[i], plain[i], 1e-12, 1e-14)) << i;
      EXPECT_GT(plain[i].abs().sum().item<double>(), 0);
    }
  });
}

// Force-field style loss: the gradient by the input is part of the loss (double backward).
TEST(Backward, AGradientInsideTheLossGivesTheOneRankResult) {
  const auto forces = [](testing::Net& net, const at::Tensor& x) {
    const at::Tensor in = x.clone().requires_grad_();
    const at::Tensor energy = net(in).sum();
    const at::Tensor force = torch::autograd::grad({energy}, {in}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return (force.square().sum() + energy.square()) / 4;
  };
  torch::manual_seed(9);
  const at::Tensor x = torch::randn({4, 6}, torch::kDouble);
  std::vector<at::Tensor> reference;
  {
    testing::Net net = testing::make_net();
    net->to(torch::kDouble);
    ((forces(net, x.narrow(0, 0, 2)) + forces(net, x.narrow(0, 2, 2))) / 2).backward();
    for (const auto& p : net->parameters()) reference.push_back(p.grad().clone());
  }
  on_threads(2, [&](World& world) {
    testing::Net net = testing::make_net();
    net->to(torch::kDouble);
    DataParallel dp(net.ptr(), world.comm());
    for (const bool create_graph : {false, true}) {
      net->zero_grad();
      forces(net, x.narrow(0, world.rank() * 2, 2)).backward({}, std::nullopt, create_graph);
      const auto parameters = net->parameters();
      for (size_t i = 0; i < parameters.size(); ++i)
        EXPECT_TRUE(torch::allclose(parameters[i].grad(), reference[i], testing::kFp64Parity, 1e-14)) << i;
    }
  });
}

TEST(Gradients, ComplexParametersAreReducedAndSparseOnesRefused) {
  on_threads(2, [](World& world) {
    at::Tensor z = torch::view_as_complex(torch::ones({3, 2}, torch::kDouble)).clone().requires_grad_();
    DataParallel dp({{"z", z}}, {}, world.comm());
    (z * (world.rank() + 1.0)).abs().square().sum().backward();
    const auto z1 = torch::view_as_real(z.grad())[0][0].item<double>();
    EXPECT_DOUBLE_EQ(z1, 2.0 * (1 + 4) / 2);

    torch::nn::Embedding table(torch::nn::EmbeddingOptions(4, 2).sparse(true));
    DataParallel sparse(table.ptr(), world.comm());
    try {
      table(torch::zeros({1}, torch::kLong)).sum().backward();
      ADD_FAILURE() << "not refused";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("'weight' has a sparse gradient"));
    }
  });
}

TEST(Buffers, FollowTheStatedPolicy) {
  for (const auto policy : {BufferPolicy::broadcast, BufferPolicy::average, BufferPolicy::local}) {
    on_threads(3, [&](World& world) {
      torch::nn::BatchNorm1d net(torch::nn::BatchNorm1dOptions(2).momentum(1.0));
      DataParallel dp(net.ptr(), world.comm(), {.buffers = policy});
      net(torch::full({4, 2}, world.rank() + 1.0)).sum().backward();
      const std::map<BufferPolicy, float> expected{
          {BufferPolicy::broadcast, 1.0F}, {BufferPolicy::average, 2.0F}, {BufferPolicy::local, world.rank() + 1.0F}};
      EXPECT_FLOAT_EQ(net->running_mean[0].item<float>(), expected.at(policy));
    });
  }
}

TEST(Norm, IsThatOfTheReducedGradientForAnyNormType) {
  on_threads(2, [](World& world) {
    at::Tensor a = torch::zeros({2}, torch::kDouble).requires_grad_(), b = torch::zeros({1}, torch::kDouble).requires_grad_();
    DataParallel dp({{"a", a}, {"b", b}}, {}, world.comm());
    const double mine = world.rank() == 0 ? 0.5 : 1.5;
    (mine * (3 * a[0] + 4 * a[1] - 12 * b[0])).backward();
    EXPECT_DOUBLE_EQ(dp.grad_norm(), 13.0);
    EXPECT_DOUBLE_EQ(dp.grad_norm(1.0), 19.0);
    EXPECT_DOUBLE_EQ(dp.grad_norm(std::numeric_limits<double>::infinity()), 12.0);
    EXPECT_DOUBLE_EQ(dp.clip_grad_norm(26.0), 13.0);
    EXPECT_DOUBLE_EQ(b.grad().item<double>(), -12.0);
    EXPECT_DOUBLE_EQ(dp.clip_grad_norm(6.5), 13.0);
    EXPECT_NEAR(b.grad().item<double>(), -6.0, 1e-6);
    EXPECT_THROW(dp.grad_norm(0), ConfigError);
  });
}

}  // namespace
}  // namespace weft
