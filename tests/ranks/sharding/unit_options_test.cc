// Settings of single Units, and scopes in which some parameters are whole.
#include "tests/ranks/sharding/stack.h"
#include "tests/support/message.h"
#include "tests/support/tolerances.h"
#include "weft/core/error.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using testing::difference;
using testing::on_threads;
using testing::StackSetting;
using testing::Trace;
using testing::train_stack;


struct Rules {
  const char* name;
  int ranks;
  StackSetting setting;
};

class UnitOptionsParity : public ::testing::TestWithParam<Rules> {};

TEST_P(UnitOptionsParity, EqualsOneRank) {
  const StackSetting& setting = GetParam().setting;
  const Trace reference = train_stack(Comm(), {.micro_steps = setting.micro_steps});
  on_threads(GetParam().ranks, [&](World& world) { EXPECT_LE(difference(train_stack(world.comm(), setting), reference), testing::kFp64Parity); });
  // Alone the rules change nothing.
  EXPECT_LE(difference(train_stack(Comm(), {.options = {.sharding = setting.options.sharding, .units = {setting.options.units.front()}},
                                            .micro_steps = setting.micro_steps}),
                       reference),
            testing::kFp64Parity);
}

INSTANTIATE_TEST_SUITE_P(
    Settings, UnitOptionsParity,
    ::testing::Values(
        Rules{"whole_units", 3, {.options = {.sharding = Sharding::parameters, .units = {{.units = "in|c", .sharding = Sharding::gradients}}}}},
        Rules{"each_its_own",
              4,
              {.options = {.sharding = Sharding::parameters,
                           .units = {{.units = "b", .reshard_after_forward = false},
                                     {.units = "c", .sharding = Sharding::optimizer},
                                     {.units = "*", .reshard_after_forward = 2}}},
               .micro_steps = 3,
               .reduce_every_micro_step = true}},
        Rules{"one_sharded", 2, {.options = {.sharding = Sharding::gradients, .units = {{.units = "a", .sharding = Sharding::parameters}}}, .micro_steps = 2}},
        Rules{"in_replicas", 4, {.options = {.sharding = Sharding::parameters, .dp_shard = 2, .units = {{.units = "a|b", .reshard_after_forward = false}}}}}),
    [](const auto& info) { return info.param.name; });

TEST(UnitOptions, SayWhichParametersStayWhole) {
  on_threads(2, [](World& world) {
    testing::Stack net = testing::make_stack();
    DataParallel dp(net, world.comm(), {.sharding = Sharding::parameters, .units = {{.units = "c", .sharding = Sharding::gradients}}});
    EXPECT_GT(net->c->up->weight.norm().item<double>(), 0);
    EXPECT_THAT(testing::message_of([&] { net->a->up->weight.norm(); }), HasSubstr("unit 'a'"));
  });
}

/// Gradients after one backward, whole, by name.
std::map<std::string, at::Tensor> gradients_of(World& world, DataParallelOptions options) {
  testing::Stack net = testing::make_stack();
  DataParallel dp(net, world.comm(), std::move(options));
  net(torch::full({2, 6}, 0.1 * (world.rank() + 1), torch::kDouble)).square().sum().backward();
  std::map<std::string, at::Tensor> gradients;
  for (const NamedTensor& s : dp.shards()) {
    if (s.tensor.grad().defined()) gradients[s.name] = testing::assemble(world.comm(), s.tensor.grad());
  }
  return gradients;
}

TEST(UnitOptions, ReduceDtypeRoundsWhatTheySay) {
  // Each rank's part is rounded once and so is the sum; fp32 has 2^-24. Below kExact nothing was rounded.
  constexpr double kRounded = 4.0 / (1 << 24), kExact = 1e-14;
  for (const int zero : {1, 2, 3}) {
    on_threads(3, [&](World& world) {
      const auto reference = gradients_of(world, {.sharding = sharding_of_zero(zero)});
      const auto all = gradients_of(world, {.sharding = sharding_of_zero(zero), .reduce_dtype = torch::kFloat});
      const auto some = gradients_of(world, {.sharding = sharding_of_zero(zero), .units = {{.units = "a|c", .reduce_dtype = torch::kFloat}}});
      ASSERT_EQ(all.size(), reference.size());
      double worst = 0;
      for (const auto& item : reference) {
        const std::string& name = item.first;
        const at::Tensor& exact = item.second;
        const auto error = [&](const at::Tensor& other) { return (other - exact).abs().max().item<double>() / exact.abs().max().item<double>(); };
        EXPECT_LT(error(all.at(name)), kRounded) << name;
        worst = std::max(worst, error(all.at(name)));
        const bool in_rule = name[0] == 'a' || name[0] == 'c';
        EXPECT_LT(error(some.at(name)), in_rule ? kRounded : kExact) << name << " zero " << zero;
        if (in_rule && exact.numel() > 50) {
          EXPECT_GT(error(some.at(name)), kExact) << name << " zero " << zero;
        }
      }
      EXPECT_GT(worst, kExact);
    });
  }
}

TEST(UnitOptions, ReduceDtypeHalvesTheBytes) {
  const auto sent = [](World& world, DataParallelOptions options) {
    testing::Stack net = testing::make_stack();
    DataParallel dp(net, world.comm(), std::move(options));
    const int64_t before = dp.traffic()["reduce_scatter"].sent;  // of other engines on this world
    net(torch::ones({2, 6}, torch::kDouble)).square().sum().backward();
    return dp.traffic()["reduce_scatter"].sent - before;
  };
  on_threads(2, [&](World& world) {
    const int64_t usual = sent(world, {.sharding = Sharding::parameters});
    EXPECT_EQ(sent(world, {.sharding = Sharding::parameters, .reduce_dtype = torch::kFloat}), usual / 2);
    EXPECT_EQ(sent(world, {.sharding = Sharding::parameters, .reduce_dtype = torch::kBFloat16}), usual / 4);
  });
}

TEST(UnitOptions, MistakesAreNamed) {
  on_threads(2, [](World& world) {
    const auto refused = [&](Sharding sharding, UnitOptions rule) {
      return testing::message_of([&] {
        testing::Stack net = testing::make_stack();
        DataParallel dp(net, world.comm(), {.sharding = sharding, .units = {std::move(rule)}});
      });
    };
    EXPECT_THAT(refused(Sharding::parameters, {.units = "layers.*"}), HasSubstr("'layers.*', and no Unit has such a name. The Units: in, a, b, c"));
    EXPECT_THAT(refused(Sharding::parameters, {.units = "a", .sharding = Sharding::none}), HasSubstr("Sharding::optimizer is the least"));
    EXPECT_THAT(refused(Sharding::parameters, {.units = "a", .reshard_after_forward = 2}), HasSubstr("use true or false"));
    EXPECT_THAT(refused(Sharding::parameters, {.units = "a", .reduce_dtype = torch::kLong}), HasSubstr("gradients travel as"));
    EXPECT_THAT(refused(Sharding::none, {.units = "a", .reduce_dtype = torch::kFloat}), HasSubstr("under Sharding::none"));
    EXPECT_THAT(refused(Sharding::parameters, {.units = "a", .reshard_after_forward = world.rank() == 0}), HasSubstr("ranks wrapped different options"));
  });
}

TEST(Unsharded, GathersTheNamedUnitsForAScope) {
  on_threads(3, [](World& world) {
    testing::Stack net = testing::make_stack(), whole = testing::make_stack();
    DataParallel dp(net, world.comm(), {.sharding = Sharding::parameters});
    const at::Tensor x = torch::ones({2, 6}, torch::kDouble);
    const at::Tensor before = whole(x).detach();
    {
      const auto scope = dp.unsharded("a.up.*|c.fixed");
      EXPECT_TRUE(at::equal(net->a->up->weight, whole->a->up->weight));
      EXPECT_TRUE(at::equal(net->a->down->weight, whole->a->down->weight)) << "of the same Unit";
      EXPECT_TRUE(at::equal(net->c->fixed, whole->c->fixed)) << "frozen";
      EXPECT_THAT(testing::message_of([&] { net->b->up->weight.norm(); }), HasSubstr("unit 'b'"));
      // All ranks run forward: the other Units communicate. A scope inside gathers no more than it has to.
      EXPECT_LE((net(x).detach() - before).abs().max().item<double>(), 1e-12);
      {
        const auto full = dp.gather_full();
        EXPECT_TRUE(at::equal(net->b->up->weight, whole->b->up->weight));
      }
      EXPECT_THAT(testing::message_of([&] { net->b->up->weight.norm(); }), HasSubstr("unit 'b'"));
      const at::NoGradGuard no_grad;
      net->a->up->weight.mul_(2);
      whole->a->up->weight.mul_(2);
    }
    EXPECT_THAT(testing::message_of([&] { net->a->up->weight.norm(); }), HasSubstr("unit 'a'"));
    const at::Tensor after = whole(x).detach();
    EXPECT_GT((after - before).abs().max().item<double>(), 1e-3);
    EXPECT_LE((net(x).detach() - after).abs().max().item<double>(), 1e-12) << "what was written is part of the shards";
    net(x).square().sum().backward();
    EXPECT_GT(dp.grad_norm(), 0);
  });
}

TEST(Unsharded, RanksNameTheSameAndExistingParameters) {
  on_threads(2, [](World& world) {
    testing::Stack net = testing::make_stack();
    DataParallel dp(net, world.comm(), {.sharding = Sharding::parameters});
    EXPECT_THAT(testing::message_of([&] { (void)dp.unsharded(world.rank() == 0 ? "a.*" : "b.*"); }), HasSubstr("'a.*' on rank 0 and of 'b.*' on rank 1"));
    EXPECT_THAT(testing::message_of([&] { (void)dp.unsharded("layers.0.*"); }), HasSubstr("no parameter has such a name. The first is"));
    const auto scope = dp.unsharded("out.*");  // kept whole anyway
    EXPECT_GT(net->out->weight.norm().item<double>(), 0);
  });
  testing::Stack net = testing::make_stack();
  DataParallel alone(net, Comm(), {.sharding = Sharding::parameters});
  EXPECT_THAT(testing::message_of([&] { (void)alone.unsharded("nothing"); }), HasSubstr("no parameter has such a name"));
  const auto scope = alone.unsharded("a.*");
}

}  // namespace
}  // namespace weft
