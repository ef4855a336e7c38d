// Pipelines on real ranks against one rank of plain libtorch.
#include <gmock/gmock.h>

#include "tests/ranks/pipeline/stack.h"
#include "weft/core/error.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using testing::on_threads;
using testing::PipeModel;
using testing::PipeTrace;

struct PipeSetting {
  const char* schedule;
  int ranks, chunks, micro_batches;
  int calls = 1;  // of step() per update
};

PipeTrace train_pipe(const PipeSetting& s, int64_t cells, PipeModel kind, std::vector<int64_t> modules = {}) {
  PipeTrace trace;
  std::mutex mutex;
  const std::string name = s.schedule;
  const Placement placement = name == "zb-v" || name == "dualpipe-v" ? Placement::v : Placement::loop;
  on_threads(s.ranks, [&](World& world) {
    Stages stages = cut(testing::pipe_model(cells, kind), world.comm(), {.chunks = s.chunks, .placement = placement, .modules = modules});
    PipelineOptions options;
    if (kind == PipeModel::tied) options.unsplit = Unsplit::with_input;  // the tied matrix
    Pipeline pipe(std::move(stages), schedule::maker(s.schedule), world.comm(), testing::pipe_loss, options);
    torch::optim::SGD optimizer = testing::pipe_optimizer(*pipe.module());
    for (int64_t step = 0; step < testing::kPipeSteps; ++step) {
      optimizer.zero_grad();
      double total = 0;
      for (int call = 0; call < s.calls; ++call) {
        const auto data = testing::pipe_data(kind, step * s.calls + call);
        // Alternately summed once, and after every call.
        pipe.sync(step % 2 == 1 || call + 1 == s.calls);
        total += pipe.step(data.inputs, data.targets, {.micro_batches = s.micro_batches}).loss;
      }
      if (world.rank() == s.ranks - 1) trace.losses.push_back(total);
      if (step + 1 == testing::kPipeSteps) testing::note_tensors(trace.gradients, *pipe.module(), true);
      optimizer.step();
    }
    testing::note_tensors(trace.weights, *pipe.module(), false);
  });
  return trace;
}

TEST(PipelineParity, EverySchedule) {
  const PipeTrace reference = testing::pipe_reference(7, PipeModel::linear);
  const PipeSetting settings[] = {
      {"gpipe", 2, 1, 4},  {"gpipe", 3, 1, 5},        {"gpipe", 2, 2, 3},      {"gpipe", 4, 1, 1},      {"1f1b", 1, 1, 3},
      {"1f1b", 2, 1, 8},   {"1f1b", 3, 1, 2},         {"1f1b", 4, 1, 10},      {"interleaved", 2, 2, 4}, {"interleaved", 3, 2, 5},
      {"interleaved", 4, 2, 1}, {"interleaved", 2, 3, 6}, {"zb-h1", 2, 1, 4}, {"zb-h1", 3, 1, 7},      {"zb-h1", 4, 1, 2},
      {"zb-h1", 2, 2, 4},  {"zb-v", 2, 2, 4},         {"zb-v", 3, 2, 3},       {"zb-v", 4, 2, 8},       {"dualpipe-v", 2, 2, 4},
      {"dualpipe-v", 3, 2, 7}, {"dualpipe-v", 4, 2, 8}, {"zb-v", 2, 2, 1}};
  for (const PipeSetting& s : settings) {
    SCOPED_TRACE(fmt::format("{} on {} ranks x {} chunks, {} micro-batches", s.schedule, s.ranks, s.chunks, s.micro_batches));
    testing::expect_same(train_pipe(s, 7, PipeModel::linear), reference);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(PipelineParity, TiedFirstAndLastStageAndAccumulation) {
  for (const int calls : {1, 2}) {
    const PipeTrace reference = testing::pipe_reference(4, PipeModel::tied, testing::kPipeRows, calls);
    for (const PipeSetting& s : {PipeSetting{"1f1b", 2, 1, 3, calls}, {"zb-h1", 3, 1, 4, calls}, {"zb-v", 2, 2, 4, calls}, {"interleaved", 3, 2, 4, calls}}) {
      SCOPED_TRACE(fmt::format("{} on {} ranks, {} calls", s.schedule, s.ranks, calls));
      testing::expect_same(train_pipe(s, 4, PipeModel::tied), reference);
    }
  }
}

/// 30 layers on 4 stages, as they come.
TEST(PipelineParity, LayersThatDoNotDivide) {
  const PipeTrace reference = testing::pipe_reference(30, PipeModel::linear);
  testing::expect_same(train_pipe({"1f1b", 4, 1, 6}, 30, PipeModel::linear, {9, 7, 8, 8}), reference);
  testing::expect_same(train_pipe({"interleaved", 4, 2, 5}, 30, PipeModel::linear), reference);
}

}  // namespace
}  // namespace weft
