// What a pipeline promises besides numbers: memory, evaluation, side inputs, shapes that change, refusals, failures.
#include <gmock/gmock.h>

#include <csignal>

#include "tests/ranks/pipeline/stack.h"
#include "weft/core/error.h"
#include "weft/memory/account.h"
#include "weft/memory/cpu_allocator.h"
#include "weft/schedule/text.h"

namespace weft {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using testing::on_threads;
using testing::PipeModel;

Stages pipe_cut(const Comm& comm, int chunks = 1, Placement placement = Placement::loop) {
  return cut(testing::pipe_model(4, PipeModel::linear), comm, {.chunks = chunks, .placement = placement});
}

/// What a run with `micro_batches` holds at most on stage 0, in bytes of activations.
int64_t peak_of_first_stage(const char* schedule, int micro_batches) {
  int64_t peak = 0;
  on_threads(3, [&](World& world) {
    Pipeline pipe(pipe_cut(world.comm()), schedule::maker(schedule), world.comm(), testing::pipe_loss);
    const auto data = testing::pipe_data(PipeModel::linear, 0, int64_t{64} * micro_batches);
    pipe.step(data.inputs, data.targets, {.micro_batches = micro_batches});  // gradients exist, shapes are known
    world.comm().barrier();
    memory::reset_peak();
    world.comm().barrier();
    const int64_t before = memory::usage().of(memory::Category::activations);
    std::optional<memory::Scope> scope;
    if (world.rank() == 0) scope.emplace(memory::Category::activations);
    pipe.step(data.inputs, data.targets, {.micro_batches = micro_batches});
    if (world.rank() == 0) peak = memory::usage().peak_by(memory::Category::activations) - before;
  });
  return peak;
}

TEST(PipelineMemory, FirstStageHoldsAtMostTheRanksMicroBatches) {
  install_cpu_allocator();
  constexpr int kMany = 9, kRanks = 3;
  const int64_t one = peak_of_first_stage("gpipe", 1), many = peak_of_first_stage("gpipe", kMany);
  const int64_t held = (many - one) / (kMany - 1);  // by one more micro-batch between F and B
  EXPECT_GT(held, int64_t{64} * testing::kPipeWidth * 8 * 3) << "several activations of [64, 7] in fp64";
  EXPECT_LE(peak_of_first_stage("1f1b", kMany), one + (kRanks - 1) * held + held / 2);
  EXPECT_LE(peak_of_first_stage("zb-h1", kMany), one + (kRanks - 1) * held + held / 2);
  EXPECT_GE(many, kMany * held);
}

/// Adds a bias that comes from the side, and counts rows with what is left of a mask.
struct SidedImpl : torch::nn::Module {
  SidedImpl() { layer = register_module("layer", Split<torch::nn::Linear>(4, 4)); }
  std::vector<at::Tensor> forward(const at::Tensor& x, const at::Tensor& ids, const SideInputs& side) {
    return {torch::tanh(layer(x)) + side.at("shift") * ids.to(x.scalar_type()).unsqueeze(1), ids + 1};
  }
  Split<torch::nn::Linear> layer{nullptr};
};
TORCH_MODULE(Sided);

TEST(PipelineInputs, SideInputsSeveralTensorsAndNewShapes) {
  on_threads(3, [](World& world) {
    const Comm& comm = world.comm();
    const auto make = [] {
      static std::mutex generator;
      const std::lock_guard lock(generator);
      torch::manual_seed(1);
      std::vector<Sided> list;
      for (int i = 0; i < 3; ++i) list.emplace_back()->to(torch::kDouble);
      return list;
    };
    std::vector<Sided> whole = make();
    const Sided mine = make()[static_cast<size_t>(comm.rank())];
    Stages stages{.local = {}, .owner = {0, 1, 2}, .tied = {}, .module = mine.ptr()};
    stages.local.emplace(comm.rank(), stage_of(mine, "sided"));
    Pipeline pipe(std::move(stages), schedule::zb_h1(), comm, [](const at::Tensor& out, const at::Tensor& target) { return (out - target).square().mean(); });
    std::vector<at::Tensor> sums;  // gradients of all calls, which add up
    for (const int64_t rows : {7, 7, 5}) {  // 5: shapes are exchanged again
      const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(rows));
      const at::Tensor x = torch::randn({rows, 4}, generator, torch::kDouble), ids = torch::arange(rows), shift = torch::randn({rows, 4}, generator, torch::kDouble);
      const at::Tensor target = torch::randn({rows, 4}, generator, torch::kDouble);
      const StepOptions options{.micro_batches = 3, .side = {{"shift", shift}}, .outputs = true};
      const PipelineResult evaluated = pipe.evaluate({x, ids}, target, options);
      const PipelineResult result = pipe.step({x, ids}, target, options);
      std::vector<at::Tensor> expected{x, ids};
      for (Sided& stage : whole) expected = stage->forward(expected[0], expected[1], {{"shift", shift}});
      const at::Tensor loss = (expected[0] - target).square().mean();
      EXPECT_NEAR(result.loss, loss.item<double>(), 1e-12);
      EXPECT_NEAR(evaluated.loss, loss.item<double>(), 1e-12);
      for (const PipelineResult* r : {&evaluated, &result}) {
        ASSERT_EQ(r->outputs.size(), comm.rank() == 2 ? 2U : 0U);
        if (comm.rank() != 2) continue;
        EXPECT_LT((r->outputs[0] - expected[0]).abs().max().item<double>(), 1e-12);
        EXPECT_TRUE(r->outputs[1].equal(expected[1]));
      }
      const auto gradients = torch::autograd::grad({loss}, whole[static_cast<size_t>(comm.rank())]->parameters());
      sums.resize(gradients.size());
      for (size_t i = 0; i < gradients.size(); ++i) {
        sums[i] = sums[i].defined() ? sums[i] + gradients[i] : gradients[i];
        EXPECT_LT((pipe.module()->parameters()[i].grad() - sums[i]).abs().max().item<double>(), 1e-12);
        EXPECT_GT(gradients[i].abs().max().item<double>(), 1e-4);
      }
      EXPECT_GE(result.bubble, 0);
      EXPECT_LT(result.bubble, 1);
    }
  });
}

TEST(PipelineInputs, AScheduleFromAFile) {
  // 1F1B of two ranks as PyTorch's compute-only CSV has it; the second rank starts one backward late.
  const schedule::Schedule own = schedule::from_csv("0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1F1,1B0,1B1,1F2,1B2\n");
  const auto reference = testing::pipe_reference(4, PipeModel::linear);
  on_threads(2, [&](World& world) {
    Pipeline pipe(pipe_cut(world.comm()), schedule::only(own), world.comm(), testing::pipe_loss);
    const auto data = testing::pipe_data(PipeModel::linear, 0);
    EXPECT_NEAR(pipe.step(data.inputs, data.targets, {.micro_batches = 3}).loss, reference.losses[0], 1e-10);
    EXPECT_THAT([&] { pipe.step(data.inputs, data.targets, {.micro_batches = 4}); }, ThrowsMessage<ConfigError>(HasSubstr("is for 3 micro-batches")));
  });
}

struct PlainImpl : torch::nn::Module {
  PlainImpl() { layer = register_module("layer", torch::nn::Linear(3, 3)); }
  at::Tensor forward(const at::Tensor& x) { return layer(x); }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Plain);

TEST(PipelineRules, RefusalsNameTheRemedy) {
  on_threads(2, [](World& world) {
    const Comm& comm = world.comm();
    const auto plain = [&] {
      Plain module;
      Stages stages{.local = {}, .owner = {0, 1}, .tied = {}, .module = module.ptr()};
      stages.local.emplace(comm.rank(), stage_of(module));
      return stages;
    };
    const auto loss = [](const at::Tensor& out, const at::Tensor&) { return out.square().mean(); };
    EXPECT_THAT([&] { Pipeline(plain(), schedule::zb_h1(), comm, loss); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("'layer'"), HasSubstr("weft::Split<torch::nn::Linear>"), HasSubstr("with_input"))));
    Pipeline asked(plain(), schedule::zb_h1(), comm, loss, {.unsplit = Unsplit::with_input});
    EXPECT_GT(asked.step(torch::ones({4, 3}), torch::ones({4, 3}), {.micro_batches = 2}).loss, 0);
    EXPECT_GT(asked.module()->parameters()[0].grad().abs().max().item<double>(), 0);
    EXPECT_THAT([&] { Pipeline(pipe_cut(comm, 2), schedule::zb_v(), comm, loss); }, ThrowsMessage<ConfigError>(HasSubstr("Placement::v")));
    EXPECT_THAT([&] { pipe_cut(comm, 9); }, ThrowsMessage<ConfigError>(AllOf(HasSubstr("18 stages"), HasSubstr("1 to 6"))));
    EXPECT_THAT([&] { cut(testing::pipe_model(4, PipeModel::linear), comm, {.modules = {2, 3}}); }, ThrowsMessage<ConfigError>(HasSubstr("6 modules")));
    Pipeline pipe(pipe_cut(comm), schedule::one_f_one_b(), comm, testing::pipe_loss);
    EXPECT_THAT([&] { pipe.step(torch::ones({4, 5}, torch::kDouble), torch::ones({4, 3}), {.micro_batches = 2 + comm.rank()}); },
                ThrowsMessage<ConfigError>(HasSubstr("2 and 3 micro-batches")));
  });
}

/// What each of the ranks says when `body` throws somewhere.
std::vector<std::string> failures_of(int ranks, const std::function<void(World&)>& body) {
  std::vector<std::string> said(static_cast<size_t>(ranks));
  try {
    World::threads(ranks, [&](World& world) {
      world.comm().barrier();  // nobody is stopped before it has begun
      try {
        body(world);
      } catch (const std::exception& error) {
        said[static_cast<size_t>(world.rank())] = error.what();
        throw;
      }
    }, {.timeout = testing::kTestTimeout});
  } catch (const std::exception&) {
  }
  return said;
}

struct BreaksImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    if (++calls == 3) throw std::runtime_error("a worn-out tape");
    return x * 1;
  }
  int calls = 0;
};
TORCH_MODULE(Breaks);

TEST(PipelineFailure, AThrowNamesStageAndMicroBatchOnAllRanks) {
  const auto said = failures_of(3, [](World& world) {
    torch::nn::Sequential net{Split<torch::nn::Linear>(3, 3), Breaks(), Split<torch::nn::Linear>(3, 3)};
    Pipeline pipe(cut(net, world.comm(), {.modules = {1, 1, 1}}), schedule::one_f_one_b(), world.comm(),
                  [](const at::Tensor& out, const at::Tensor&) { return out.mean(); });
    pipe.step(torch::ones({8, 3}), torch::ones({8, 3}), {.micro_batches = 4});
  });
  for (const std::string& text : said) {
    EXPECT_THAT(text, AllOf(HasSubstr("pipeline stage 1"), HasSubstr("micro-batch 2"), HasSubstr("F2.1"), HasSubstr("a worn-out tape"))) << text;
  }
}

TEST(PipelineFailure, TooManyMicroBatchesAndMissingTargetsEndAllRanks) {
  auto said = failures_of(2, [](World& world) {
    Pipeline pipe(pipe_cut(world.comm()), schedule::gpipe(), world.comm(), testing::pipe_loss);
    pipe.step(torch::ones({4, 5}, torch::kDouble), torch::ones({4, 3}, torch::kDouble), {.micro_batches = 5});
  });
  for (const std::string& text : said) EXPECT_THAT(text, HasSubstr("5 micro-batches of 4 rows"));
  said = failures_of(2, [](World& world) {
    Pipeline pipe(pipe_cut(world.comm()), schedule::gpipe(), world.comm(), testing::pipe_loss);
    pipe.step(torch::ones({4, 5}, torch::kDouble), {}, {.micro_batches = 2});
  });
  for (const std::string& text : said) EXPECT_THAT(text, HasSubstr("targets are missing"));
}

/// Ends its process without a word.
struct DiesImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    if (++calls == 6) std::raise(SIGKILL);
    return x * 1;
  }
  int calls = 0;
};
TORCH_MODULE(Dies);

const testing::RankBody kDyingPipe("dying_pipe", [](World& world, const std::string&) -> std::string {
  torch::nn::Sequential net{Split<torch::nn::Linear>(3, 3), Dies(), Split<torch::nn::Linear>(3, 3)};
  Pipeline pipe(cut(net, world.comm(), {.modules = {1, 1, 1}}), schedule::zb_h1(), world.comm(),
                [](const at::Tensor& out, const at::Tensor&) { return out.mean(); });
  for (int step = 0; step < 4; ++step) pipe.step(torch::ones({8, 3}), torch::ones({8, 3}), {.micro_batches = 4});
  return "done";
});

TEST(PipelineFailure, AKilledStageIsNamedByTheOthers) {
  for (const char* backend : {"local", "gloo"}) {
    testing::RankProcesses ranks(3, "dying_pipe", "", {.backend = backend});
    const auto results = ranks.wait();
    EXPECT_EQ(results[1].exit_code, 128 + SIGKILL);
    for (const int rank : {0, 2}) {
      EXPECT_EQ(results[static_cast<size_t>(rank)].exit_code, 3) << backend << results[static_cast<size_t>(rank)].result;
      EXPECT_THAT(results[static_cast<size_t>(rank)].result, HasSubstr("rank 1")) << backend;
    }
  }
}

}  // namespace
}  // namespace weft
