// What a program must not do to a wrapped module is found and named, at every position of the dial; what it may do counts.
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>

#include "tests/ranks/sharding/factors.h"
#include "weft/core/error.h"
#include "weft/core/log.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using testing::Dial;
using testing::expect_gradients;
using testing::expect_right_step;
using testing::factor_loss;
using testing::Factors;
using testing::forget_step;
using testing::kDials;
using testing::on_threads;

class Rules : public ::testing::TestWithParam<Dial> {};
INSTANTIATE_TEST_SUITE_P(Dials, Rules, ::testing::ValuesIn(kDials), [](const auto& info) { return info.param.name; });

constexpr int kEverywhere = -1;
bool applies(int where, const World& world) { return where == kEverywhere || where == world.rank(); }

/// Backward ends with a ConfigError of the same text on every rank.
void expect_rule_everywhere(const std::string& text, const std::string& where, const std::function<void()>& backward) {
  try {
    backward();
    ADD_FAILURE() << "not noticed, " << where;
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr(text)) << where;
  }
}

TEST_P(Rules, AParameterFrozenOrUnfrozenLaterIsNamedOnEveryRank) {
  for (const int where : {kEverywhere, 1}) {
    on_threads(3, [&](World& world) {
      Factors net;
      DataParallel dp(net, world.comm(), testing::options_of(GetParam()));
      struct Change {
        at::Tensor parameter;
        bool trainable;
        std::string text;
      };
      for (const Change& change : {Change{net->factors[1]->w, false, "parameter 'b.w' was trainable when it was wrapped"},
                                   Change{net->factors[2]->fixed, true, "parameter 'c.fixed' was frozen when it was wrapped"},
                                   Change{net->factors[0]->unused, false, "parameter 'a.unused' was trainable when it was wrapped"}}) {
        forget_step(dp);
        const bool mine = applies(where, world);
        if (mine) at::Tensor(change.parameter).set_requires_grad(change.trainable);
        expect_rule_everywhere(change.text, std::to_string(where), [&] { factor_loss(net, world, dp).backward(); });
        testing::expect_no_gradients(dp, change.text);
        if (mine) at::Tensor(change.parameter).set_requires_grad(!change.trainable);
        at::Tensor(net->factors[2]->fixed).mutable_grad().reset();
        expect_right_step(world, net, dp, "after it was taken back");
      }
    });
  }
}

// Storage of a parameter that is used: found on its rank when its gradient lands; the peers learn what it was.
TEST_P(Rules, StorageReplacedAfterWrappingIsNamed) {
  for (const int where : {kEverywhere, 1}) {
    on_threads(3, [&](World& world) {
      Factors net;
      DataParallel dp(net, world.comm(), testing::options_of(GetParam()));
      if (applies(where, world)) net->factors[2]->w.set_data(torch::full({testing::kElements}, 2.0, torch::kDouble));
      try {
        factor_loss(net, world, dp).backward();
        ADD_FAILURE() << "not noticed";
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("parameter 'c.w' was given other storage"));
        const auto* comm_error = dynamic_cast<const CommError*>(&error);
        EXPECT_EQ(comm_error == nullptr, applies(where, world));
        const std::vector<int> none;
        EXPECT_EQ(comm_error != nullptr ? comm_error->failure().peers : none, comm_error != nullptr ? std::vector<int>{1} : none);
      }
      dp.finish();
      testing::expect_no_gradients(dp, "after");
    });
  }
}

// Of one that brings no gradient: found when the round closes, named on every rank.
TEST_P(Rules, StorageOfAnUnusedParameterIsCheckedToo) {
  on_threads(3, [&](World& world) {
    Factors net;
    DataParallel dp(net, world.comm(), testing::options_of(GetParam()));
    if (world.rank() == 2) net->factors[3]->unused.set_data(torch::ones({3}, torch::kDouble));
    expect_rule_everywhere("rank 2: parameter 'd.unused' was given other storage", "unused", [&] { factor_loss(net, world, dp).backward(); });
  });
}

TEST_P(Rules, ToAfterWrappingIsNamed) {
  on_threads(2, [&](World& world) {
    Factors net;
    DataParallel dp(net, world.comm(), testing::options_of(GetParam()));
    try {
      net->to(torch::kFloat);
      net(torch::ones({testing::kElements}).requires_grad_()).sum().backward();
      ADD_FAILURE() << "not noticed";
    } catch (const std::exception& error) {  // released parameters say so themselves
      EXPECT_THAT(error.what(), ::testing::AnyOf(HasSubstr("'d.w' was given other storage"), HasSubstr("unit 'a'")));
    }
    dp.finish();
  });
}

/// What was logged while it lives.
class Said {
 public:
  Said() : before_(set_log([this](LogLevel, std::string_view text) { lines_.emplace_back(text); })) {}
  ~Said() { set_log(before_); }
  std::vector<std::string> lines() const { return lines_; }

 private:
  std::vector<std::string> lines_;  // the sink is called one at a time
  LogSink before_;
};

// A gradient that the program put in place is added to, as on one rank; each wrapper says it once.
TEST_P(Rules, GradientsThatTheProgramReplacedCountAndAreSaidOnce) {
  const Said said;
  on_threads(3, [&](World& world) {
    Factors net;
    DataParallel dp(net, world.comm(), testing::options_of(GetParam()));
    for (int step = 0; step < 3; ++step) {
      forget_step(dp);
      for (auto& factor : net->factors) {
        if (world.rank() != 2) factor->w.mutable_grad() = torch::full({testing::kElements}, 10.0 * (world.rank() + 1), torch::kDouble);
      }
      factor_loss(net, world, dp).backward();
      expect_gradients(dp, testing::mean_gradient(world) + 10, "replaced before backward");
      // Between micro-steps: what was there is gone, what the program put there counts.
      forget_step(dp);
      dp.sync(false);
      factor_loss(net, world, dp).backward();
      for (auto& factor : net->factors) factor->w.mutable_grad() = torch::full({testing::kElements}, 3.0, torch::kDouble);
      dp.sync(true);
      factor_loss(net, world, dp).backward();
      expect_gradients(dp, testing::mean_gradient(world) + 3, "replaced between micro-steps");
    }
  });
  EXPECT_THAT(said.lines(), ::testing::UnorderedElementsAre(HasSubstr("'d.w' and of 3 more"), HasSubstr("'d.w' and of 3 more"),
                                                            HasSubstr("'d.w' and of 3 more")));
}

// Setting gradients to None forgets them and nothing else; it is what zero_grad() does, so nothing is said.
TEST_P(Rules, GradientsSetToNoneAreForgotten) {
  const Said said;
  on_threads(2, [&](World& world) {
    Factors net;
    DataParallel dp(net, world.comm(), testing::options_of(GetParam()));
    dp.sync(false);
    factor_loss(net, world, dp).backward();
    for (auto& factor : net->factors) factor->w.mutable_grad().reset();
    factor_loss(net, world, dp).backward();
    dp.sync(true);
    factor_loss(net, world, dp).backward();
    expect_gradients(dp, 2 * testing::mean_gradient(world), "the first micro-step is forgotten");
    // By the wrapper, which also forgets what had been reduced.
    dp.continue_accumulation();
    dp.sync(false);
    factor_loss(net, world, dp).backward();
    dp.zero_grad();
    dp.sync(true);
    factor_loss(net, world, dp).backward();
    expect_gradients(dp, testing::mean_gradient(world), "all before is forgotten");
  });
  EXPECT_THAT(said.lines(), ::testing::IsEmpty());
}

TEST_P(Rules, SparseGradientsAreRefusedByName) {
  on_threads(2, [&](World& world) {
    torch::nn::Sequential net(Unit<torch::nn::Embedding>(torch::nn::EmbeddingOptions(64, 2).sparse(true)));
    DataParallel dp(net, world.comm(), testing::options_of(GetParam()));
    try {
      net->forward(torch::zeros({1}, torch::kLong)).sum().backward();
      ADD_FAILURE() << "not refused";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr("'0.weight' has a sparse gradient"));
    }
    dp.finish();
  });
}

// An exception that nobody catches ends the rank; the others name it, whatever collective they are in.
TEST_P(Rules, ARankThatEndsIsNamedByTheOthers) {
  std::atomic<int> told{0};
  EXPECT_ANY_THROW(on_threads(3, [&](World& world) {
    Factors net;
    DataParallel dp(net, world.comm(), testing::options_of(GetParam()));
    expect_right_step(world, net, dp, "before");
    forget_step(dp);
    if (world.rank() == 1) {
      net->factors[2]->w.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("the disk is full"); });
      factor_loss(net, world, dp).backward();
    }
    try {
      factor_loss(net, world, dp).backward();
      ADD_FAILURE() << "rank " << world.rank() << " took the step";
    } catch (const CommError& error) {
      EXPECT_EQ(error.failure().peers, std::vector<int>{1}) << error.what();
      EXPECT_THAT(error.what(), HasSubstr("the disk is full"));
      ++told;
    }
  }));
  EXPECT_EQ(told, 2);
}

}  // namespace
}  // namespace weft
