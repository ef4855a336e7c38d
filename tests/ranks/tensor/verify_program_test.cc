// weft::verify for a user's program: what is right passes, what is broken is found and named; ranks as threads and as processes.
#include <gmock/gmock.h>
#include <torch/nn/modules/normalization.h>

#include <nlohmann/json.hpp>

#include "tests/support/ranks.h"
#include "tests/support/test_pch.h"
#include "weft/autograd/collectives.h"
#include "weft/core/error.h"
#include "weft/nn/deferred.h"
#include "weft/nn/unit.h"
#include "weft/parallel/parallelize.h"
#include "weft/train/verify_program.h"

namespace weft {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int64_t kInputs = 6, kInner = 12, kLength = 4;

/// What is wrong with the layer.
enum class Fault { none, norm_not_summed, gradient_scaled, replica_drifts };

/// A gradient that is a thousandth too large on the last rank.
struct Scaled : torch::autograd::Function<Scaled> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.view_as(x); }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*, torch::autograd::tensor_list g) { return {g[0] * 1.001}; }
};

struct MlpBlockImpl : torch::nn::Module {
  explicit MlpBlockImpl(Fault f) : fault(f) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kInputs})));
    up = register_module("up", Split<torch::nn::Linear>(kInputs, kInner));
    down = register_module("down", Split<torch::nn::Linear>(kInner, kInputs));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = torch::tanh(up(norm(x)));
    if (fault == Fault::gradient_scaled && on_last_rank) h = Scaled::apply(h);
    return x + down(h);
  }
  torch::nn::LayerNorm norm{nullptr};
  Split<torch::nn::Linear> up{nullptr}, down{nullptr};
  Fault fault;
  bool on_last_rank = false;
};
TORCH_MODULE(MlpBlock);

struct RegressorImpl : torch::nn::Module {
  explicit RegressorImpl(Fault fault) {
    a = register_module("a", Unit<MlpBlock>(Fault::none));
    b = register_module("b", Unit<MlpBlock>(fault));
    to(torch::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return b(a(x)); }  // [B, T, 6], or this rank's part of T
  Unit<MlpBlock> a{nullptr}, b{nullptr};
};
TORCH_MODULE(Regressor);

VerifyProgram program_of(const VerifyRanks& ranks, Fault fault, bool with_memory) {
  Regressor net = with_memory ? Regressor(fault) : deferred([&] { return Regressor(fault); }, {.seed = 3});
  net->b->on_last_rank = ranks.tp.rank() + 1 == ranks.tp.size() && ranks.tp.size() > 1;
  TensorPlan plan{{"*.up", TensorStyle::column}, {"*.down", TensorStyle::row}};
  if (ranks.sequence_parallel) plan.insert(plan.begin(), {fault == Fault::norm_not_summed ? "a.norm" : "*.norm", TensorStyle::sequence});
  parallelize(*net, ranks.tp, plan);
  const auto my_part = [ranks](const at::Tensor& x) {
    return ranks.sequence_parallel ? x.narrow(1, ranks.tp.rank() * kLength / ranks.tp.size(), kLength / ranks.tp.size()) : x;
  };
  return {.module = net.ptr(),
          .loss_sum = [net, my_part](const std::vector<at::Tensor>& batch) mutable { return (net(my_part(batch[0])) - my_part(batch[1])).square().sum(); },
          .loss_of_part = ranks.sequence_parallel};
}

std::vector<at::Tensor> batch_of(int64_t step) {
  const at::Tensor x = (at::arange(6 * kLength * kInputs, at::kDouble) * 0.7 + static_cast<double>(step)).sin().view({6, kLength, kInputs});
  return {x, x.flip(2).square()};
}

VerifyReport report_of(Fault fault, const std::string& layouts, VerifyOptions options = {}, bool with_memory = false) {
  return verify([=](const VerifyRanks& ranks) { return program_of(ranks, fault, with_memory); }, batch_of, layouts, options);
}

/// A replica whose optimizer does a little more than the others'.
struct Drifting : torch::optim::AdamW {
  Drifting(std::vector<at::Tensor> parameters, bool d) : torch::optim::AdamW(std::move(parameters)), drifts(d) {}
  at::Tensor step(LossClosure closure = nullptr) override {
    const at::Tensor loss = torch::optim::AdamW::step(std::move(closure));
    const at::NoGradGuard no_grad;
    if (drifts) param_groups()[0].params().back().mul_(1 + 1e-7);
    return loss;
  }
  bool drifts;
};

TEST(VerifyProgram, ARightProgramPassesUnderEveryLayout) {
  const std::string layouts = "dp=2; dp=3,zero=1; tp=2; tp=4; tp=2,sequence_parallel=true; dp_shard=2,zero=3,tp=2,micro_batch=1; dp=2,zero=2,tp=2,micro_batch=2";
  for (const bool with_memory : {false, true}) {
    const VerifyReport report = report_of(Fault::none, layouts, {.clip_norm = 0.5}, with_memory);
    EXPECT_EQ(report.rows.size(), 7U);
    EXPECT_EQ(report.dtype, "fp64");
    EXPECT_TRUE(report.ok()) << to_text(report);
  }
}

TEST(VerifyProgram, WhatIsBrokenIsFoundAndNamed) {
  const auto first = [](const VerifyReport& report) {
    EXPECT_FALSE(report.ok());
    return report.rows.at(0).first;
  };
  const VerifyReport report = report_of(Fault::norm_not_summed, "tp=2,sequence_parallel=true; tp=2");
  EXPECT_THAT(first(report), StartsWith("gradient of b.norm.weight"));
  EXPECT_TRUE(report.rows.at(1).ok()) << "the layer is right without sequence parallelism";
  const auto json = nlohmann::json::parse(to_json(report));
  EXPECT_FALSE(json["ok"]);
  EXPECT_EQ(json["layouts"][0]["first"], report.rows[0].first);
  EXPECT_THAT(to_text(report), AllOf(HasSubstr("OUT: gradient of b.norm.weight"), HasSubstr("fp64")));
  EXPECT_THAT(first(report_of(Fault::gradient_scaled, "tp=2")), StartsWith("gradient of a.norm.weight"));  // b.up, and what lies before it

  // A replica that drifts after the reduction: rank 0 computes what one rank does, and nobody else would look.
  VerifyOptions options{.steps = 1};
  options.make_optimizer = [](const DataParallel& dp) {
    std::vector<at::Tensor> parameters;
    for (const NamedTensor& p : dp.shards()) parameters.push_back(p.tensor);
    return std::make_unique<Drifting>(parameters, dp.comm().size() > 1 && dp.comm().rank() + 1 == dp.comm().size());
  };
  EXPECT_THAT(first(report_of(Fault::none, "dp=3", options)), AllOf(StartsWith("copies of b.down.bias"), HasSubstr("data-parallel ranks")));
  EXPECT_TRUE(report_of(Fault::none, "tp=2", options).ok());
}

TEST(VerifyProgram, WhatCannotBeRunIsSaidByLayout) {
  const VerifyReport report = report_of(Fault::none, "tp=5; dp=7; tp=2");
  EXPECT_THAT(report.rows[0].first, AllOf(HasSubstr("12 outputs"), HasSubstr("1, 2, 3, 4, 6, 12")));
  EXPECT_THAT(report.rows[1].first, HasSubstr("6 samples for 7 ranks"));
  EXPECT_TRUE(report.rows[2].ok());
  EXPECT_THROW(report_of(Fault::none, "tp=2,train.recompute=full"), ConfigError) << "the program would not see it";
  EXPECT_THROW(report_of(Fault::none, ""), ConfigError);
  const auto whole = verify([](const VerifyRanks&) { return program_of({}, Fault::none, false); }, batch_of, "tp=2");
  EXPECT_THAT(whole.rows[0].first, HasSubstr("shares nothing out"));
  const MakeModel dead = [](const VerifyRanks& ranks) {
    VerifyProgram program = program_of(ranks, Fault::none, false);
    program.loss_sum = [loss = program.loss_sum](const auto& batch) { return loss(batch) * 0; };
    return program;
  };
  EXPECT_THROW(verify(dead, batch_of, "dp=2"), ConfigError);
}

const testing::RankBody kVerifyOnProcesses("verify_program", [](World& world, const std::string& fault) -> std::string {
  VerifyOptions options;
  options.world = world;
  torch::manual_seed(5);  // as a program does whose modules draw their own start values
  return to_json(report_of(fault == "broken" ? Fault::norm_not_summed : Fault::none, "tp=2,sequence_parallel=true; dp=2,zero=3; tp=4", options, true));
});

TEST(VerifyProgram, RanksMayBeProcesses) {
  for (const std::string fault : {"none", "broken"}) {
    const auto ranks = testing::on_processes(2, "verify_program", fault);
    ASSERT_EQ(ranks[0].exit_code, 0) << ranks[0].result;
    EXPECT_EQ(ranks[0].result, ranks[1].result) << "the same report on every rank";
    const auto json = nlohmann::json::parse(ranks[0].result);
    EXPECT_EQ(json["layouts"][0]["ok"], fault == "none");
    EXPECT_THAT(json["layouts"][0]["first"], StartsWith(fault == "none" ? "" : "gradient of b.norm.weight"));
    EXPECT_TRUE(json["layouts"][1]["ok"]) << json.dump(2);
    EXPECT_THAT(json["layouts"][2]["first"], HasSubstr("do not divide this job's 2"));
  }
}

}  // namespace
}  // namespace weft
