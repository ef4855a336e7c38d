// Ordinary libtorch code around a wrapped module: the rows of docs/ordinary-code.md, each at every position of the dial.
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/serialize.h>

#include "tests/ranks/sharding/factors.h"
#include "weft/core/error.h"
#include "weft/nn/activations.h"
#include "weft/nn/sync_batch_norm.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using testing::expect_gradients;
using testing::factor_loss;
using testing::Factors;
using testing::forget_step;
using testing::kElements;
using testing::mean_gradient;

struct Position {
  const char* name;
  int ranks;
  DataParallelOptions options;
  bool sharded() const { return options.sharding != Sharding::none; }
  bool released() const { return options.sharding == Sharding::parameters; }
};

const std::vector<Position>& positions() {
  static const std::vector<Position> all = [] {
    std::vector<Position> list;
    for (const testing::Dial& dial : testing::kDials) list.push_back({dial.name, 3, testing::options_of(dial)});
    DataParallelOptions near = testing::options_of({"", 3}), hybrid = near;
    near.reshard_after_forward = 2;
    hybrid.dp_shard = 2;
    list.push_back({"zero3_near", 4, near});
    list.push_back({"hsdp", 4, hybrid});
    return list;
  }();
  return all;
}

/// Runs `row` on real ranks at every position.
void everywhere(const std::function<void(World&, const Position&)>& row) {
  for (const Position& position : positions()) {
    SCOPED_TRACE(position.name);
    testing::on_threads(position.ranks, [&](World& world) { row(world, position); });
  }
}

std::string error_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

double number_of(DataParallel& dp, const at::Tensor& parameter) {
  const auto full = dp.gather_full();
  return parameter.min().item<double>();
}

TEST(OrdinaryCode, ZeroGradOfTheOptimizer) {
  everywhere([](World& world, const Position& position) {
    Factors net;
    DataParallel dp(net, world.comm(), position.options);
    std::vector<at::Tensor> shards;
    for (const NamedTensor& s : dp.shards()) shards.push_back(s.tensor);
    torch::optim::SGD optimizer(shards, torch::optim::SGDOptions(0.0));
    for (const bool to_none : {true, false, true}) {
      factor_loss(net, world, dp).backward();
      expect_gradients(dp, mean_gradient(world), position.name);
      dp.step(optimizer);
      optimizer.zero_grad(to_none);
    }
    // The module's own zero_grad() sees the module's own gradients: the shards' are not among them.
    factor_loss(net, world, dp).backward();
    dp.continue_accumulation();
    net->zero_grad();
    factor_loss(net, world, dp).backward();
    expect_gradients(dp, (position.sharded() ? 2 : 1) * mean_gradient(world), position.name);
  });
}

TEST(OrdinaryCode, CloneIsAPlainModuleWithTheValues) {
  everywhere([](World& world, const Position& position) {
    torch::nn::Sequential net{Unit<torch::nn::BatchNorm1d>(torch::nn::BatchNorm1dOptions(kElements))};
    DataParallel dp(net, world.comm(), position.options);
    if (position.released()) {
      EXPECT_THAT(error_of([&] { net->clone(); }), HasSubstr("unit '0'"));
    }
    std::shared_ptr<torch::nn::Module> copy;
    {
      const auto full = dp.gather_full();
      copy = net->clone();
    }
    EXPECT_TRUE(at::equal(copy->parameters()[0].detach(), torch::ones({kElements})));
    net->forward(torch::randn({4, kElements})).sum().backward();  // of the original only
    EXPECT_FALSE(copy->parameters()[0].grad().defined());
    EXPECT_TRUE(copy->as<torch::nn::SequentialImpl>()->forward(torch::randn({4, kElements})).requires_grad());
  });
}

TEST(OrdinaryCode, SaveAndLoad) {
  everywhere([](World& world, const Position& position) {
    Factors net;
    DataParallel dp(net, world.comm(), position.options);
    std::stringstream file;
    if (position.released()) {
      EXPECT_THAT(error_of([&] { torch::save(net, file); }), HasSubstr("unit 'a'"));
      file.str("");
    }
    {
      const auto full = dp.gather_full();
      const at::NoGradGuard no_grad;
      net->factors[1]->w.fill_(5);
      torch::save(net, file);
    }
    const std::string saved = file.str();
    Factors plain;
    std::stringstream into_plain(saved), into_wrapped(saved);
    torch::load(plain, into_plain);
    EXPECT_EQ(plain->factors[1]->w.min().item<double>(), 5);
    EXPECT_EQ(number_of(dp, net->factors[1]->w), 5) << "what was written in the scope is kept";
    // torch::load replaces storage: refused where it is seen, at the latest at the end of the next backward.
    const std::string text = error_of([&] {
      torch::load(net, into_wrapped);
      factor_loss(net, world, dp).backward();
    });
    EXPECT_THAT(text, ::testing::AnyOf(HasSubstr("was given other storage"), HasSubstr("unit 'a'")));
    dp.finish();
  });
}

TEST(OrdinaryCode, SeveralForwardsBeforeOneBackward) {
  everywhere([](World& world, const Position& position) {
    Factors net;
    DataParallel dp(net, world.comm(), position.options);
    const at::Tensor first = factor_loss(net, world, dp), second = factor_loss(net, world, dp);
    (first + 2 * second).backward();
    expect_gradients(dp, 3 * mean_gradient(world), position.name);
    // And one that is never followed by a backward.
    forget_step(dp);
    factor_loss(net, world, dp);
    factor_loss(net, world, dp).backward();
    expect_gradients(dp, mean_gradient(world), position.name);
  });
}

TEST(OrdinaryCode, RetainGraph) {
  everywhere([](World& world, const Position& position) {
    for (const Recompute mode : {Recompute::none, Recompute::full}) {
      Factors net;
      DataParallel dp(net, world.comm(), position.options);
      set_recompute(net, {.mode = mode});
      const at::Tensor loss = factor_loss(net, world, dp);
      loss.backward({}, /*retain_graph=*/true);
      expect_gradients(dp, mean_gradient(world), position.name);
      dp.continue_accumulation();
      loss.backward();
      expect_gradients(dp, 2 * mean_gradient(world), position.name);
      EXPECT_THAT(error_of([&] { loss.backward(); }), HasSubstr("backward through the graph a second time"));
      EXPECT_THAT(error_of([&] { dp.finish(); }), ::testing::AnyOf(HasSubstr("backward"), HasSubstr("no error")));
    }
  });
}

TEST(OrdinaryCode, BackwardToSomeParametersOnly) {
  everywhere([](World& world, const Position& position) {
    for (const Recompute mode : {Recompute::none, Recompute::full}) {
      Factors net;
      DataParallel dp(net, world.comm(), position.options);
      set_recompute(net, {.mode = mode});
      factor_loss(net, world, dp).backward({}, /*retain_graph=*/false, /*create_graph=*/false, std::vector<at::Tensor>{net->factors[1]->w, net->factors[3]->w});
      dp.finish();
      for (const NamedTensor& shard : dp.shards()) {
        const bool asked = shard.name == "b.w" || shard.name == "d.w";
        ASSERT_EQ(shard.tensor.grad().defined(), asked) << shard.name;
        if (!asked) continue;
        EXPECT_TRUE(at::allclose(shard.tensor.grad(), at::full_like(shard.tensor.grad(), mean_gradient(world)))) << shard.name;
      }
      testing::expect_right_step(world, net, dp, position.name);
    }
  });
}

TEST(OrdinaryCode, TwoModelsAndTwoOptimizers) {
  everywhere([](World& world, const Position& position) {
    Factors generator, critic;
    DataParallel first(generator, world.comm(), position.options), second(critic, world.comm(), position.options);
    std::vector<at::Tensor> shards[2];
    for (const NamedTensor& s : first.shards()) shards[0].push_back(s.tensor);
    for (const NamedTensor& s : second.shards()) shards[1].push_back(s.tensor);
    torch::optim::SGD move_first(shards[0], torch::optim::SGDOptions(0.01)), move_second(shards[1], torch::optim::SGDOptions(0.01));
    const at::Tensor x = torch::full({kElements}, 1.0 / (world.rank() + 1), torch::kDouble).requires_grad_();
    const double mean = [&] {
      double sum = 0;
      for (int r = 0; r < world.size(); ++r) sum += 1.0 / (r + 1);
      return sum / world.size();
    }();
    // The critic alone learns from what the generator made, then the generator through the critic.
    critic(generator(x).detach()).sum().backward();
    expect_gradients(second, 16.0 * 8 * mean, position.name);
    for (const NamedTensor& s : first.shards()) EXPECT_FALSE(s.tensor.grad().defined()) << s.name;
    second.step(move_second);
    second.zero_grad();
    const double moved = 2 - 0.01 * 16 * 8 * mean;
    critic(generator(x)).sum().backward();
    expect_gradients(first, std::pow(moved, 4) * 8 * mean, position.name);
    first.step(move_first);
    first.zero_grad();
    second.continue_accumulation();
    second.zero_grad();
    EXPECT_NEAR(number_of(second, critic->factors[0]->w), moved, 1e-12);
    EXPECT_NEAR(number_of(first, generator->factors[0]->w), 2 - 0.01 * std::pow(moved, 4) * 8 * mean, 1e-12);
  });
}

TEST(OrdinaryCode, ParametersLeftOut) {
  everywhere([](World& world, const Position& position) {
    if (position.released()) return;  // a list has no Units, and is kept whole
    Factors net;
    std::vector<NamedTensor> managed;
    for (const auto& item : net->named_parameters()) {
      if (item.key() != "c.w") managed.push_back({item.key(), item.value()});
    }
    DataParallel dp(managed, {}, world.comm(), position.options);
    scale_loss(net(testing::input_of(world)).sum(), world.size(), dp).backward();
    expect_gradients(dp, mean_gradient(world), position.name);
    const at::Tensor own = net->factors[2]->w.grad();
    EXPECT_TRUE(at::allclose(own, at::full_like(own, 8.0 * (world.rank() + 1)))) << "this rank's own gradient";
  });
}

TEST(OrdinaryCode, SyncBatchNormInsideARecomputedUnit) {
  const at::Tensor all = torch::randn({12, 5}, torch::kDouble);
  torch::nn::BatchNorm1d plain(5);
  plain->to(torch::kDouble);
  torch::tanh(plain(all)).square().sum().backward();
  everywhere([&](World& world, const Position& position) {
    torch::nn::Sequential net(Unit<nn::SyncBatchNorm>(5, world.comm()), torch::nn::Tanh());
    net->to(torch::kDouble);
    DataParallel dp(net, world.comm(), position.options);
    set_recompute(net);
    const int64_t rows = 12 / world.size();
    scale_loss(net->forward(all.narrow(0, world.rank() * rows, rows)).square().sum(), 1, dp).backward();
    const at::Tensor grad = dp.shards()[0].tensor.grad();
    const at::Tensor whole = position.sharded() ? testing::assemble(world.comm(), grad, position.options.dp_shard) : grad.flatten();
    EXPECT_TRUE(at::allclose(whole, plain->weight.grad(), 1e-10, 1e-12));
    EXPECT_TRUE(at::allclose(net->buffers()[0], plain->running_mean, 1e-10, 1e-12)) << "counted once";
    EXPECT_EQ(net->buffers()[2].item<int64_t>(), 1);
  });
}

TEST(OrdinaryCode, SeveralGroupsOfRanks) {
  everywhere([](World& world, const Position& position) {
    if (position.ranks < 4) return;
    const Comm half = world.comm().split(world.rank() % 2, world.rank(), "half");
    DataParallelOptions options = position.options;
    options.dp_shard = 0;
    options.reshard_after_forward = true;
    Factors mine, everybodys;
    DataParallel in_half(mine, half, options), in_all(everybodys, world.comm(), position.options);
    const double mean_of_half = 8.0 * (world.rank() % 2 == 0 ? 1 + 3 : 2 + 4) / 2;
    for (int step = 0; step < 2; ++step) {
      mine(testing::input_of(world)).sum().backward();
      factor_loss(everybodys, world, in_all).backward();
      expect_gradients(in_half, mean_of_half, position.name);
      expect_gradients(in_all, mean_gradient(world), position.name);
      forget_step(in_half);
      forget_step(in_all);
    }
  });
}

TEST(OrdinaryCode, Fp8ParametersAreRefusedByName) {
  everywhere([](World& world, const Position& position) {
    struct LowImpl : torch::nn::Module {
      LowImpl() { w = register_parameter("w", torch::ones({kElements}).to(at::kFloat8_e4m3fn), /*requires_grad=*/true); }
      at::Tensor forward(const at::Tensor& x) { return x * w.to(torch::kFloat); }
      at::Tensor w;
    };
    torch::nn::Sequential net{Unit<LowImpl>()};
    try {
      DataParallel dp(net, world.comm(), position.options);
      ADD_FAILURE() << "not refused";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), ::testing::AllOf(HasSubstr("'0.w'"), HasSubstr("Float8_e4m3fn")));
    }
  });
}

}  // namespace
}  // namespace weft
