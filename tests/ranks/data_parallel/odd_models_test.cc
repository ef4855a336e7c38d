// DataParallel with models and programs of an unusual kind: right numbers, or an error that every rank gets.
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>

#include "tests/support/message.h"
#include "tests/support/problem.h"
#include "tests/support/tolerances.h"
#include "weft/core/error.h"

namespace weft {
namespace {

using testing::on_threads;

at::Tensor parameter(at::IntArrayRef sizes, double value = 1.0) { return torch::full(sizes, value, torch::kDouble).requires_grad_(); }

// Parameters of 3, 1 and 0 elements and a scalar; fewer elements than ranks.
TEST(OddModels, TinyAndEmptyParametersTrain) {
  for (const int ranks : {2, 3, 4}) {
    for (const int64_t bucket : {8, 1 << 20}) {
      on_threads(ranks, [&](World& world) {
        const at::Tensor three = parameter({3}), one = parameter({1}), none = parameter({0, 8}), scalar = parameter({});
        DataParallel dp({{"three", three}, {"one", one}, {"none", none}, {"scalar", scalar}}, {}, world.comm(),
                        {.bucket = {.bytes = bucket, .last_bytes = bucket}});
        const double x = world.rank() + 1.0, mean = (world.size() + 1) / 2.0;
        for (int step = 0; step < 2; ++step) {
          dp.zero_grad();
          (x * (three.sum() + one.sum() + none.sum() + scalar)).backward();
          EXPECT_TRUE(at::equal(three.grad(), torch::full({3}, mean, torch::kDouble)));
          EXPECT_EQ(one.grad().item<double>(), mean);
          EXPECT_EQ(scalar.grad().item<double>(), mean);
          EXPECT_EQ(none.grad().sizes(), at::IntArrayRef({0, 8}));
          EXPECT_NEAR(dp.clip_grad_norm(1.0), mean * std::sqrt(5.0), 1e-12);
        }
      });
    }
  }
}

TEST(OddModels, NothingToTrainIsNoWork) {
  on_threads(3, [](World& world) {
    torch::nn::Sequential none{torch::nn::ReLU()};
    DataParallel empty(none, world.comm());
    torch::nn::Linear net(2, 1);
    for (auto& p : net->parameters()) p.set_requires_grad(false);
    DataParallel frozen(net, world.comm());
    for (DataParallel* dp : {&empty, &frozen}) {
      if (world.rank() == 0) dp->join_without_batch();  // the others cannot run a backward
      dp->finish();
      dp->zero_grad();
      EXPECT_EQ(dp->grad_norm(), 0.0);
      EXPECT_TRUE(dp->parameters().empty());
    }
  });
}

TEST(OddModels, StridesOfParametersDoNotMatter) {
  on_threads(2, [](World& world) {
    torch::nn::Conv2d net(torch::nn::Conv2dOptions(3, 4, 2));
    net->to(torch::kDouble);
    net->weight.set_data(torch::arange(48, torch::kDouble).view({4, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast));
    const at::Tensor before = net->weight.detach().clone();
    DataParallel dp(net, world.comm());
    EXPECT_TRUE(at::equal(net->weight.detach(), before));
    net(torch::full({1, 3, 2, 2}, world.rank() + 1.0, torch::kDouble)).sum().backward();
    EXPECT_TRUE(at::equal(net->weight.grad(), torch::full({4, 3, 2, 2}, 1.5, torch::kDouble)));
  });
}

TEST(OddModels, WhatCannotBeWrappedIsNamedOnEveryRank) {
  const at::Tensor good = parameter({2});
  const std::vector<std::pair<std::vector<NamedTensor>, std::string>> bad{
      {{{"w", good}, {"gone", at::Tensor()}}, "parameter 'gone': is undefined"},
      {{{"w", good}, {"w", parameter({2})}}, "parameter 'w': is listed twice"},
      {{{"w", good * 2}}, "parameter 'w': is the result of a computation"},
      {{{"w", good}, {"tail", good.detach().narrow(0, 1, 1).requires_grad_()}}, "parameter 'tail': shares memory with 'w'"},
  };
  for (const auto& [list, text] : bad) {
    EXPECT_THAT(testing::config_error([&] { DataParallel(list, {}, Comm()); }), ::testing::HasSubstr(text));
    on_threads(3, [&, &list = list, &text = text](World& world) {
      // Rank 1 alone has the fault; the others must not wait for it.
      const auto mine = world.rank() == 1 ? list : std::vector<NamedTensor>{{"w", parameter({2})}};
      EXPECT_THAT(testing::config_error([&] { DataParallel(mine, {}, world.comm()); }), ::testing::AllOf(::testing::HasSubstr("rank 1"), ::testing::HasSubstr(text)));
    });
  }
  EXPECT_THAT(testing::config_error([] { DataParallel(std::shared_ptr<torch::nn::Module>(), Comm()); }), ::testing::HasSubstr("no module"));
}

// Ranks that wrap the same parameters in another order, with other shapes, other frozen ones, or other options.
TEST(OddModels, DifferencesBetweenRanksAreNamedOnEveryRank) {
  struct Difference {
    std::function<DataParallel(const Comm&)> build;
    std::string text;
  };
  const auto linear = [](int64_t in, int64_t out) { return NamedTensor{"w", parameter({in, out})}; };
  const std::vector<Difference> differences{
      {[&](const Comm& c) { return DataParallel({c.rank() == 1 ? linear(2, 3) : linear(3, 2)}, {}, c); }, "'w' [3, 2] Double on rank 0 and parameter 'w' [2, 3]"},
      {[&](const Comm& c) {
         std::vector<NamedTensor> list{{"a", parameter({2})}, {"b", parameter({2})}};
         if (c.rank() == 1) std::swap(list[0], list[1]);
         return DataParallel(list, {}, c);
       },
       "'a' [2] Double on rank 0 and parameter 'b' [2] Double on rank 1"},
      {[&](const Comm& c) { return DataParallel({{"w", parameter({2}).set_requires_grad(c.rank() != 1)}}, {}, c); }, "Double frozen on rank 1"},
      {[&](const Comm& c) { return DataParallel({linear(2, 2)}, {}, c, {.grad_scale = c.rank() == 1 ? GradScale::sum : GradScale::mean_over_ranks}); },
       "grad_scale sum"},
      {[&](const Comm& c) { return DataParallel({linear(2, 2)}, {}, c, {.bucket = {.bytes = 100 + c.rank()}}); }, "different options"},
  };
  for (const Difference& difference : differences) {
    on_threads(3, [&](World& world) {
      EXPECT_THAT(testing::config_error([&] { difference.build(world.comm()); }), ::testing::HasSubstr(difference.text));
    });
  }
}

TEST(OddModels, AParameterUnfrozenAfterWrappingIsNamed) {
  on_threads(2, [](World& world) {
    const at::Tensor w = parameter({2}), late = parameter({2}).set_requires_grad(false);
    DataParallel dp({{"w", w}, {"late", late}}, {}, world.comm());
    w.sum().backward();
    at::Tensor(late).set_requires_grad(true);
    EXPECT_THAT(testing::config_error([&] { (w + late).sum().backward(); }), ::testing::HasSubstr("'late' was frozen when it was wrapped"));
  });
}

// Generator and judge, one optimizer, losses through both, and a step in which only one takes part.
TEST(SeveralModels, UnderOneOptimizerGiveTheOneRankResult) {
  const auto train = [](const Comm& comm) {
    testing::Net first = testing::make_net(), second = testing::make_net();
    first->to(torch::kDouble);
    second->to(torch::kDouble);
    DataParallel dp_first(first, comm), dp_second(second, comm, {.bucket = {.bytes = 64, .last_bytes = 8}});
    auto parameters = first->parameters();
    for (const auto& p : second->parameters()) parameters.push_back(p);
    torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-2));
    const at::Tensor all = torch::sin(torch::arange(12 * 6, torch::kDouble)).view({12, 6});
    const int64_t rows = 12 / comm.size();
    const at::Tensor x = all.narrow(0, comm.rank() * rows, rows);
    for (int step = 0; step < 6; ++step) {
      optimizer.zero_grad();
      const at::Tensor y = first(x).repeat({1, 2});  // [rows, 6]
      (step % 3 == 2 ? y.square().mean() : (second(y) - y.narrow(1, 0, 3)).square().mean()).backward();
      if (step % 3 == 1) (first(x) + second(x)).abs().mean().backward();
      optimizer.step();
    }
    std::vector<at::Tensor> weights;
    for (const auto& p : parameters) weights.push_back(p.detach().clone());
    return weights;
  };
  const auto reference = train(Comm());
  EXPECT_FALSE(torch::allclose(reference[0], testing::make_net()->parameters()[0].to(torch::kDouble))) << "nothing was trained";
  for (const int ranks : {2, 3}) {
    on_threads(ranks, [&](World& world) {
      const auto weights = train(world.comm());
      for (size_t i = 0; i < weights.size(); ++i) EXPECT_TRUE(torch::allclose(weights[i], reference[i], testing::kFp64Parity, 1e-13)) << i;
    });
  }
}

TEST(Backward, OverOnePartOfTheModelAfterTheOther) {
  on_threads(3, [](World& world) {
    const at::Tensor a = parameter({2}), b = parameter({3});
    DataParallel dp({{"a", a}, {"b", b}}, {}, world.comm(), {.bucket = {.bytes = 8, .last_bytes = 8}});
    const double x = world.rank() + 1.0;
    for (int step = 0; step < 2; ++step) {
      dp.zero_grad();
      (x * a).sum().backward();
      EXPECT_FALSE(b.grad().defined());
      (10 * x * b).sum().backward();
      (x * x * a.sum() * b.sum()).backward();
      EXPECT_NEAR(a.grad()[0].item<double>(), 2 + 3 * 14.0 / 3, 1e-12);   // mean of 1, 2, 3; of 1, 4, 9
      EXPECT_NEAR(b.grad()[0].item<double>(), 20 + 2 * 14.0 / 3, 1e-12);
    }
  });
}

/// x * w, whose backward gives w no gradient on some ranks: what custom functions do with branches that they skip.
struct MaybeGradient : torch::autograd::Function<MaybeGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& w, bool skip) {
    ctx->save_for_backward({x, w});
    ctx->saved_data["skip"] = skip;
    return x * w;
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::tensor_list grads) {
    const auto saved = ctx->get_saved_variables();
    return {grads[0] * saved[1], ctx->saved_data["skip"].toBool() ? at::Tensor() : grads[0] * saved[0], at::Tensor()};
  }
};

TEST(Gradients, AFunctionMayGiveAParameterNone) {
  on_threads(3, [](World& world) {
    const at::Tensor a = parameter({2}), b = parameter({2}), c = parameter({2});
    DataParallel dp({{"a", a}, {"b", b}, {"c", c}}, {}, world.comm(), {.bucket = {.bytes = 8, .last_bytes = 8}});
    for (int step = 0; step < 2; ++step) {
      dp.zero_grad();
      const at::Tensor x = MaybeGradient::apply(torch::ones({2}, torch::kDouble) * a, b, world.rank() != 1);
      MaybeGradient::apply(x, c, true).sum().backward();
      EXPECT_EQ(a.grad()[0].item<double>(), 1.0);
      EXPECT_NEAR(b.grad()[0].item<double>(), 1.0 / 3, 1e-15);
      EXPECT_FALSE(c.grad().defined());
    }
  });
}

TEST(Gradients, ReplacedByTheProgramAreAddedToAndReduced) {
  on_threads(2, [](World& world) {
    at::Tensor w = parameter({2});
    DataParallel dp({{"w", w}}, {}, world.comm());
    const double x = world.rank() + 1.0;
    w.mutable_grad() = torch::full({2}, 10 * x, torch::kDouble);  // a tensor of the program's own
    (x * w).sum().backward();
    EXPECT_EQ(w.grad()[1].item<double>(), 16.5);
    w.mutable_grad().reset();
    (x * w).sum().backward();
    EXPECT_EQ(w.grad()[1].item<double>(), 1.5);
  });
}

TEST(Wrapper, MovesIntoAnotherAndLeavesTheOldModelAlone) {
  on_threads(2, [](World& world) {
    const at::Tensor old = parameter({1}), w = parameter({1});
    DataParallel dp({{"old", old}}, {}, world.comm());
    dp = DataParallel({{"w", w}}, {}, world.comm());
    const double x = world.rank() + 1.0;
    (x * (old + w)).sum().backward();
    EXPECT_EQ(old.grad().item<double>(), x) << "the wrapper that was replaced still reduces";
    EXPECT_EQ(w.grad().item<double>(), 1.5);
  });
}

}  // namespace
}  // namespace weft
