// HSDP: replicas x shards give one rank's numbers, send what the formula says, and do not drift apart in silence.
#include <torch/nn/modules/container/sequential.h>

#include "tests/ranks/sharding/stack.h"
#include "tests/support/tolerances.h"
#include "weft/comm/mesh.h"
#include "weft/core/error.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using testing::difference;
using testing::Method;
using testing::on_threads;
using testing::StackSetting;
using testing::Trace;
using testing::train_stack;


struct Grid {
  int replicas, shards, zero;
  bool reshard = true;
  int64_t micro_steps = 1;
  bool every = false;  // reduce every micro-step
  Method method = Method::weft_adamw;
  bool once = false;   // over the replicas in the last micro-step only
};

std::string grid_name(const ::testing::TestParamInfo<Grid>& info) {
  const Grid& g = info.param;
  return std::to_string(g.replicas) + "x" + std::to_string(g.shards) + "_zero" + std::to_string(g.zero) + (g.reshard ? "" : "_keep") + "_" +
         std::to_string(g.micro_steps) + (g.every ? "reduced" : "micro") + (g.once ? "_across_once" : "");
}

StackSetting setting_of(const Grid& g) {
  StackSetting setting{.method = g.method, .micro_steps = g.micro_steps, .reduce_every_micro_step = g.every, .across_once = g.once};
  setting.options.sharding = sharding_of_zero(g.zero);
  setting.options.dp_shard = g.shards;
  setting.options.reshard_after_forward = g.reshard;
  setting.options.bucket = {.bytes = 1200, .last_bytes = 200};
  return setting;
}

class HybridParity : public ::testing::TestWithParam<Grid> {};

TEST_P(HybridParity, EqualsOneRank) {
  const StackSetting setting = setting_of(GetParam());
  const Trace reference = train_stack(Comm(), {.method = setting.method, .micro_steps = setting.micro_steps});
  on_threads(GetParam().replicas * GetParam().shards, [&](World& world) {
    const Trace trace = train_stack(world.comm(), setting);
    ASSERT_EQ(trace.gradients.size(), reference.gradients.size());
    EXPECT_LE(difference(trace, reference), testing::kFp64Parity);
  });
}

INSTANTIATE_TEST_SUITE_P(Grids, HybridParity,
                         ::testing::Values(Grid{2, 2, 1, true, 3, true}, Grid{2, 2, 2, true, 2, false, Method::weft_sgd}, Grid{2, 2, 3},
                                           Grid{2, 2, 3, false, 3, true, Method::torch_adamw}, Grid{3, 1, 1}, Grid{3, 1, 2, true, 2, true},
                                           Grid{3, 1, 3, true, 1, false, Method::own}, Grid{1, 3, 2}, Grid{1, 3, 3, true, 2, true},
                                           Grid{2, 1, 1}, Grid{2, 1, 2, true, 3, false, Method::torch_adamw}, Grid{2, 1, 3},
                                           Grid{2, 2, 1, true, 3, true, Method::weft_sgd, true}, Grid{3, 1, 2, true, 2, true, Method::own, true},
                                           Grid{2, 2, 3, true, 3, true, Method::weft_adamw, true}),
                         grid_name);

TEST(HybridParity, MeshAndGloo) {
  const Trace reference = train_stack(Comm(), {});
  on_threads(4, [&](World& world) { EXPECT_LE(difference(train_stack(world.comm(), setting_of({2, 2, 3})), reference), testing::kFp64Parity); },
             BackendKind::gloo);
  // The mesh's axes are the grid; without sharding all its ranks are replicas.
  for (const int zero : {0, 1, 3}) {
    on_threads(4, [&](World& world) {
      const Mesh mesh(world, {{"dp_replicate", 2}, {"dp_shard", 2}});
      testing::Stack net = testing::make_stack();
      DataParallel dp(net, mesh, {.sharding = sharding_of_zero(zero)});
      EXPECT_EQ(dp.options().dp_shard, zero == 0 ? 0 : 2);
      EXPECT_EQ(dp.comm().size(), 4);
      net(torch::full({2, 6}, 0.1 * (world.rank() + 1), torch::kDouble)).square().mean().backward();
      const double norm = dp.grad_norm();
      testing::Stack alone = testing::make_stack();
      const at::Tensor rows = torch::arange(1, 5, torch::kDouble).mul(0.1).view({4, 1}).expand({4, 6}).contiguous();
      alone(rows).square().mean().backward();
      double squares = 0;
      for (const at::Tensor& p : alone->parameters()) {
        if (p.grad().defined()) squares += p.grad().square().sum().item<double>();
      }
      EXPECT_NEAR(norm, std::sqrt(squares), testing::kFp64Parity * norm) << "each parameter counts once";
    });
  }
}

const testing::RankBody kProcess("hybrid_stack", [](World& world, const std::string& zero) -> std::string {
  const Trace trace = train_stack(world.comm(), setting_of({2, 2, std::stoi(zero)}));
  return std::to_string(difference(trace, train_stack(Comm(), {})) <= testing::kFp64Parity);
});

TEST(HybridParity, Processes) {
  for (const auto& rank : testing::on_processes(4, "hybrid_stack", "3")) {
    EXPECT_EQ(rank.exit_code, 0) << rank.result;
    EXPECT_EQ(rank.result, "1");
  }
}

/// The text of the exception, which every rank must get.
std::string refused(World& world, const DataParallelOptions& options) {
  testing::Stack net = testing::make_stack();
  try {
    DataParallel dp(net, world.comm(), options);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(HybridOptions, AreCheckedOnEveryRank) {
  on_threads(4, [](World& world) {
    EXPECT_THAT(refused(world, {.sharding = Sharding::gradients, .dp_shard = world.rank() == 2 ? 4 : 2}),
                HasSubstr("ranks wrapped different options: entry 0 is options sharding 2, dp_shard 2"));
    EXPECT_THAT(refused(world, {.sharding = Sharding::gradients, .dp_shard = 3}),
                HasSubstr("4 ranks do not divide into replicas of 3 (legal values: 1, 2, 4, or 0 for all)"));
    EXPECT_THAT(refused(world, {.dp_shard = 2}), HasSubstr("2 with Sharding::none"));
    EXPECT_THAT(refused(world, {.sharding = Sharding::gradients, .dp_shard = -2}), HasSubstr("replicas of -2"));
  });
  on_threads(1, [](World& world) { EXPECT_THAT(refused(world, {.sharding = Sharding::gradients, .dp_shard = 2}), HasSubstr("legal values: 1")); });
  on_threads(2, [](World& world) {
    testing::Stack net = testing::make_stack();
    const Mesh turned(world, {{"dp_shard", 2}, {"dp_replicate", 1}});
    DataParallel dp(net, turned, {.sharding = Sharding::gradients});  // an axis of size 1 has no place
    EXPECT_EQ(dp.options().dp_shard, 2);
  });
  on_threads(4, [](World& world) {
    testing::Stack net = testing::make_stack();
    const Mesh turned(world, {{"dp_shard", 2}, {"dp_replicate", 2}}), mesh(world, {{"dp_replicate", 2}, {"dp_shard", 2}});
    EXPECT_THROW(DataParallel(net, turned, {.sharding = Sharding::gradients}), ConfigError);
    EXPECT_THROW(DataParallel(net, mesh, {.sharding = Sharding::gradients, .dp_shard = 4}), ConfigError);
  });
}

TEST(HybridFailure, ABackwardThatThrowsCountsOnNoReplica) {
  for (const int zero : {1, 3}) {
    on_threads(4, [&](World& world) {
      testing::Stack net = testing::make_stack();
      DataParallel dp(net, world.comm(), {.sharding = sharding_of_zero(zero), .dp_shard = 2});
      const auto step = [&](bool fail) {
        at::Tensor h = net->b(net->a(net->in(torch::full({2, 6}, 0.1 * (world.rank() + 1), torch::kDouble))));
        if (fail) h.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("no gradient today"); });
        net->out(net->c(h)).square().sum().backward();
      };
      step(false);
      const double norm = dp.grad_norm();
      dp.zero_grad();
      dp.continue_accumulation();
      EXPECT_THROW(step(world.rank() == 3), std::exception) << "zero " << zero;
      dp.finish();
      step(false);
      EXPECT_NEAR(dp.grad_norm(), norm, 1e-12 * norm);
    });
  }
}

TEST(HybridFailure, ReplicasThatDriftApartAreSeenByTheirNorm) {
  on_threads(4, [](World& world) {
    testing::Stack net = testing::make_stack();
    DataParallel dp(net, world.comm(), {.sharding = Sharding::parameters, .dp_shard = 2});
    net(torch::ones({2, 6}, torch::kDouble)).square().sum().backward();
    EXPECT_GT(dp.grad_norm(), 0);
    for (const NamedTensor& s : dp.shards()) {
      if (world.rank() == 3 && s.name == "b.down.weight") s.tensor.mutable_grad().add_(1e-3);
    }
    try {
      dp.clip_grad_norm(1.0);
      ADD_FAILURE() << "rank " << world.rank() << " did not notice";
    } catch (const CommError& error) {
      EXPECT_THAT(error.what(), HasSubstr("replicas disagree on the norm"));
    }
  });
}

// With r replicas of s ranks: (s-1)/s of the gradients are scattered, 2(r-1)/r of a shard is all-reduced, and parameters are
// gathered once (ZeRO-1, ZeRO-2) or twice (ZeRO-3) in the replica.
TEST(HybridTraffic, FollowsTheFormula) {
  constexpr int64_t kReplicas = 2, kShards = 2;
  constexpr int64_t kFlags = 64;  // one flag per parameter and one for failure, 4 bytes each
  for (const int zero : {1, 2, 3}) {
    on_threads(kReplicas * kShards, [&](World& world) {
      torch::nn::Sequential net(Unit<torch::nn::Linear>(64, 128), Unit<torch::nn::Linear>(128, 128));
      DataParallel dp(net, world.comm(), {.sharding = sharding_of_zero(zero), .dp_shard = kShards});
      const auto optimizer = testing::make_method(Method::weft_sgd, dp);
      const int64_t before = testing::sent_bytes(dp);
      net->forward(torch::ones({2, 64})).square().sum().backward();
      optimizer->step();
      const int64_t gradients = 4 * (64 * 128 + 128 + 128 * 128 + 128);
      const int64_t scattered = gradients * (kShards - 1) / kShards, across = 2 * (kReplicas - 1) * gradients / kShards / kReplicas;
      EXPECT_NEAR(testing::sent_bytes(dp) - before, scattered * (zero == 3 ? 3 : 2) + across, kFlags) << "zero " << zero;
    });
  }
}

// Three micro-steps that reduce within replicas, the last one over the replicas, too; what is read too early is refused.
TEST(HybridAccumulation, CrossesTheReplicasOnce) {
  on_threads(4, [](World& world) {
    for (const auto& [sharding, scale] : {std::pair{Sharding::optimizer, GradScale::sum}, {Sharding::gradients, GradScale::mean_over_ranks}, {Sharding::parameters, GradScale::sum}}) {
      testing::Stack net = testing::make_stack();
      DataParallel dp(net, world.comm(), {.sharding = sharding, .dp_shard = 2, .grad_scale = scale});
      const auto pass = [&](int k) {
        dp.continue_accumulation();
        net(torch::full({2, 6}, 0.1 * (world.rank() + 1 + k), torch::kDouble)).square().sum().backward();
      };
      const auto reduced = [&] { return dp.traffic()["all_reduce"].bytes; };
      int64_t before = reduced();
      for (int k = 0; k < 3; ++k) pass(k);
      const int64_t each_time = reduced() - before;
      const double norm = dp.grad_norm();
      dp.zero_grad();

      before = reduced();
      pass(0);  // reduced everywhere: what follows adds to it
      for (const bool last : {false, true}) {
        dp.sync_replicas(last);
        pass(last ? 2 : 1);
        if (last) continue;
        for (const NamedTensor& s : dp.shards()) EXPECT_FALSE(s.tensor.grad().defined()) << s.name;
        EXPECT_THROW(dp.grad_norm(), ConfigError);
        EXPECT_THROW(dp.refresh(), ConfigError);
      }
      EXPECT_LT(reduced() - before, each_time);
      EXPECT_NEAR(dp.grad_norm(), norm, 1e-12 * norm);

      dp.zero_grad();
      dp.sync_replicas(false);
      pass(7);
      dp.zero_grad();  // drops the sums of the replica
      for (int k = 0; k < 3; ++k) {
        dp.sync_replicas(k == 2);
        pass(k);
      }
      EXPECT_NEAR(dp.grad_norm(), norm, 1e-12 * norm);
    }
  });
  on_threads(2, [](World& world) {
    testing::Stack net = testing::make_stack();
    DataParallel dp(net, world.comm(), {.sharding = Sharding::gradients, .dp_shard = 1});
    dp.sync_replicas(false);
    dp.sync_replicas(true);
    if (world.rank() == 1) dp.sync_replicas(true);  // changes nothing here
    EXPECT_NO_THROW(dp.sync_replicas(true));
  });
}

}  // namespace
}  // namespace weft
