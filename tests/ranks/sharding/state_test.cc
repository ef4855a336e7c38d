// What a sharded parameter is between uses, what the optimizer sees, and what travels.
#include <torch/nn/utils/clip_grad.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/rnn.h>
#include <torch/optim/lbfgs.h>
#include <torch/serialize.h>

#include "tests/ranks/sharding/stack.h"
#include "tests/support/message.h"
#include "weft/core/error.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using testing::on_threads;

at::Tensor batch(const World& world) { return torch::full({2, 6}, 0.1 * (world.rank() + 1), torch::kDouble); }

TEST(Released, EveryAccessNamesTheUnitAndTheRemedy) {
  on_threads(2, [](World& world) {
    testing::Stack net = testing::make_stack();
    DataParallel dp(net, world.comm(), {.sharding = Sharding::parameters});
    const at::Tensor weight = net->a->up->weight;
    std::ostringstream file;
    const std::vector<std::function<void()>> accesses{
        [&] { weight.norm(); }, [&] { weight.clone(); }, [&] { torch::save(weight, file); }, [&] { weight.data_ptr(); },
        [&] { torch::mm(weight, weight.t()); },
        [&] {
          torch::optim::AdamW optimizer(net->parameters());
          net->a->up->weight.mutable_grad() = torch::zeros({13, testing::kWidth}, torch::kDouble);
          optimizer.step();
        }};
    for (size_t i = 0; i < accesses.size(); ++i) {
      const std::string text = testing::message_of(accesses[i]);
      EXPECT_THAT(text, HasSubstr("unit 'a'")) << i;
      EXPECT_THAT(text, HasSubstr("gather_full()")) << i;
    }
    net->a->up->weight.mutable_grad().reset();
    {
      const auto full = dp.gather_full();
      EXPECT_GT(weight.norm().item<double>(), 0);
      const at::NoGradGuard no_grad;
      net->a->up->weight.fill_(0.25);
    }
    EXPECT_THAT(testing::message_of([&] { weight.norm(); }), HasSubstr("unit 'a'"));
    const auto full = dp.gather_full();
    EXPECT_TRUE(at::equal(weight.detach(), at::full_like(weight.detach(), 0.25))) << "what was written is kept";
  });
}

TEST(Stale, ForwardAfterAForeignStepIsRefusedUntilRefresh) {
  on_threads(2, [](World& world) {
    testing::Net net = testing::make_net();
    net->to(torch::kDouble);
    DataParallel dp(net, world.comm(), {.sharding = Sharding::gradients});
    const auto optimizer = testing::make_method(testing::Method::torch_adamw, dp);
    net(batch(world)).sum().backward();
    EXPECT_FALSE(net->second->weight.grad().defined());
    optimizer->step();
    EXPECT_THAT(testing::message_of([&] { net(batch(world)); }), HasSubstr("refresh()"));
    dp.refresh();
    net(batch(world)).sum().backward();
    dp.continue_accumulation();
    net(batch(world)).sum().backward();
    // Weft's own optimizer needs no call; two of them that share the shards out gather after the second.
    using Groups = std::vector<optim::OptimizerParamGroup>;
    optim::SGD first(Groups{optim::OptimizerParamGroup(std::vector<at::Tensor>{dp.shards()[0].tensor})}, optim::SGDOptions(0.1));
    std::vector<at::Tensor> rest;
    for (size_t i = 1; i < dp.shards().size(); ++i) rest.push_back(dp.shards()[i].tensor);
    optim::SGD second(Groups{optim::OptimizerParamGroup(rest)}, optim::SGDOptions(0.1));
    first.step();
    EXPECT_THAT(testing::message_of([&] { net(batch(world)); }), HasSubstr("refresh()"));
    second.step();
    net(batch(world)).sum().backward();
  });
}

TEST(Shards, CoverEveryElementOnceAndStayWhereTheyAre) {
  for (const int zero : {1, 2, 3}) {
    on_threads(4, [&](World& world) {
      testing::Stack net = testing::make_stack();
      std::vector<int64_t> numels;
      for (const auto& p : net->parameters()) {
        if (p.requires_grad()) numels.push_back(p.numel());
      }
      DataParallel dp(net, world.comm(), {.sharding = sharding_of_zero(zero)});
      const auto optimizer = testing::make_method(testing::Method::weft_adamw, dp);
      ASSERT_EQ(dp.shards().size(), numels.size());
      at::Tensor counts = torch::zeros({static_cast<int64_t>(numels.size())}, torch::kLong);
      std::vector<const void*> addresses, gradients;
      for (size_t i = 0; i < numels.size(); ++i) {
        EXPECT_EQ(dp.shards()[i].name, dp.parameters()[i].name);
        counts[static_cast<int64_t>(i)] = dp.shards()[i].tensor.numel();
        addresses.push_back(dp.shards()[i].tensor.const_data_ptr());
      }
      for (int step = 0; step < 3; ++step) {
        net(batch(world)).square().sum().backward();
        for (size_t i = 0; i < numels.size(); ++i) {
          EXPECT_EQ(dp.shards()[i].tensor.const_data_ptr(), addresses[i]);
          const at::Tensor grad = dp.shards()[i].tensor.grad();
          EXPECT_EQ(grad.defined(), dp.shards()[i].name.find("unused") == std::string::npos) << dp.shards()[i].name;
          if (step == 0) gradients.push_back(grad.defined() ? grad.const_data_ptr() : nullptr);
          EXPECT_EQ(grad.defined() ? grad.const_data_ptr() : nullptr, gradients[i]);
        }
        optimizer->step();
        dp.zero_grad();
      }
      world.comm().all_reduce(counts).wait();
      for (size_t i = 0; i < numels.size(); ++i) EXPECT_EQ(counts[static_cast<int64_t>(i)].item<int64_t>(), numels[i]);
    });
  }
}

TEST(Shards, MixedDtypesKeepTheirOwnBuffers) {
  for (const int zero : {1, 2, 3}) {
    on_threads(3, [&](World& world) {
      testing::Stack net = testing::make_stack();
      net->a->to(torch::kFloat);
      DataParallel dp(net, world.comm(), {.sharding = sharding_of_zero(zero), .gradient_dtype = torch::kDouble});
      const at::Tensor h = net->in(batch(world));
      net->out(net->a(h.to(torch::kFloat)).to(torch::kDouble)).square().sum().backward();
      for (const NamedTensor& s : dp.shards()) {
        const at::Tensor grad = s.tensor.grad();
        EXPECT_TRUE(!grad.defined() || grad.scalar_type() == torch::kDouble) << s.name;
        EXPECT_EQ(s.tensor.scalar_type(), s.name.rfind("a.", 0) == 0 ? torch::kFloat : torch::kDouble) << s.name;
      }
      EXPECT_GT(dp.grad_norm(), 0);
    });
  }
}

TEST(Optimizers, ThoseThatNeedWholeTensorsAreRefusedByName) {
  on_threads(2, [](World& world) {
    testing::Stack net = testing::make_stack();
    DataParallel dp(net, world.comm(), {.sharding = Sharding::optimizer});
    std::vector<at::Tensor> shards;
    for (const auto& s : dp.shards()) shards.push_back(s.tensor);
    torch::optim::LBFGS optimizer(shards);
    EXPECT_THAT(testing::message_of([&] { dp.step(optimizer); }), HasSubstr("LBFGS"));
    EXPECT_THAT(testing::message_of([&] { optim::param_groups<optim::SGDOptions>(dp, {{"*.bias", optim::SGDOptions(1)}}); }),
                HasSubstr("'in.weight' matches none"));
  });
}

TEST(Participation, JoinWithoutBatchAndUnequalEvaluation) {
  for (const int zero : {1, 2, 3}) {
    on_threads(3, [&](World& world) {
      testing::Stack net = testing::make_stack();
      DataParallel dp(net, world.comm(), {.sharding = sharding_of_zero(zero)});
      {
        const auto full = dp.gather_full();
        const at::NoGradGuard no_grad;
        for (int i = 0; i < world.rank(); ++i) net(batch(world));
      }
      const auto optimizer = testing::make_method(testing::Method::weft_sgd, dp);
      for (int step = 0; step < 2; ++step) {
        if (world.rank() == 1) {
          dp.join_without_batch();
        } else {
          // Each Unit once: join stands in for one pass over the Units.
          net->out(net->c(net->a(net->in(batch(world))))).square().sum().backward();
        }
        EXPECT_GT(dp.grad_norm(), 0);
        optimizer->step();
        dp.zero_grad();
      }
    });
  }
}

// Bytes that a rank sends per step: DDP and ZeRO-1/2 2(n-1)/n of the gradients, ZeRO-3 half as much again.
TEST(Traffic, FollowsTheFormula) {
  constexpr int kRanks = 4;
  std::map<int, int64_t> sent;
  std::mutex mutex;
  for (const int zero : {0, 1, 2, 3}) {
    on_threads(kRanks, [&](World& world) {
      torch::nn::Sequential net(Unit<torch::nn::Linear>(64, 128), Unit<torch::nn::Linear>(128, 128));
      DataParallel dp(net, world.comm(), {.sharding = sharding_of_zero(zero)});
      const auto optimizer = testing::make_method(testing::Method::weft_sgd, dp);
      const int64_t before = testing::sent_bytes(dp);
      net->forward(torch::ones({2, 64})).square().sum().backward();
      optimizer->step();
      if (world.rank() == 0) {
        const std::lock_guard lock(mutex);
        sent[zero] = testing::sent_bytes(dp) - before;
      }
    });
  }
  const int64_t gradients = 4 * (64 * 128 + 128 + 128 * 128 + 128);
  const int64_t ddp = 2 * (kRanks - 1) * gradients / kRanks;
  // Above it, 4 bytes each: a flag per parameter, one for failure; with Units, what comes next, three times.
  constexpr int64_t kFlags = 64;
  for (const int zero : {0, 1, 2}) EXPECT_NEAR(sent[zero], ddp, kFlags) << zero;
  EXPECT_NEAR(sent[3], ddp * 3 / 2, kFlags);
}

// Fault classes: what parity must catch when the engine goes wrong.
TEST(InjectedFault, StaleShardsAndMissedReductionsAreSeen) {
  const testing::Trace reference = testing::train_stack(Comm(), {});
  on_threads(2, [&](World& world) {
    // One rank's shard is not what its peers gathered: as if a gather had been skipped.
    testing::Stack net = testing::make_stack();
    DataParallel dp(net, world.comm(), {.sharding = Sharding::parameters});
    const auto output = [&] {
      const at::NoGradGuard no_grad;
      return net(torch::ones({1, 6}, torch::kDouble));
    };
    const at::Tensor before = output();
    if (world.rank() == 1) {
      const at::NoGradGuard no_grad;
      for (const auto& s : dp.shards()) {
        if (s.name == "c.down.weight") s.tensor.detach().add_(0.01);
      }
    }
    world.comm().barrier();
    EXPECT_GT((output() - before).abs().max().item<double>(), 1e-6) << "the shard of a peer was not gathered";
  });
}

TEST(UnitModule, FitsSequentialAndCloneAndKeepsNames) {
  torch::nn::Sequential net(Unit<torch::nn::Linear>(4, 4), torch::nn::ReLU(), Unit<torch::nn::Conv1d>(torch::nn::Conv1dOptions(1, 1, 1)));
  EXPECT_EQ(net->named_parameters()[0].key(), "0.weight");
  torch::nn::Sequential plain(Unit<torch::nn::Linear>(4, 4), torch::nn::ReLU());
  const at::Tensor x = torch::ones({2, 4});
  const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(plain->clone());
  EXPECT_TRUE(at::equal(copy->forward(x), plain->forward(x)));
  EXPECT_NE(dynamic_cast<nn::UnitBase*>(copy->ptr(0).get()), nullptr);
  EXPECT_NE(copy->parameters()[0].const_data_ptr(), plain->parameters()[0].const_data_ptr());
  Unit<torch::nn::LSTM> lstm(torch::nn::LSTMOptions(3, 5));  // returns tuple<Tensor, tuple<Tensor, Tensor>>, has an optional
  std::vector<at::Tensor> tensors;
  nn::collect_tensors(lstm->forward(torch::ones({2, 1, 3}), std::nullopt), tensors);
  EXPECT_EQ(tensors.size(), 3U);
}

}  // namespace
}  // namespace weft
