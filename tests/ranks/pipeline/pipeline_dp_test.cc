// Pipelines with data parallelism at every position of its dial.
#include <torch/nn/utils/clip_grad.h>

#include "tests/ranks/pipeline/stack.h"
#include "weft/comm/mesh.h"
#include "weft/nn/activations.h"
#include "weft/parallel/whole.h"

namespace weft {
namespace {

using testing::PipeModel;
using testing::PipeTrace;

struct PipeDpSetting {
  const char* schedule;
  int pp, dp, chunks, micro_batches;
  Sharding sharding;
  PipeModel model = PipeModel::linear;
  bool sums = false;  // loss_fn returns a sum, and gradients of ranks are added
  bool recompute = false;
  int64_t dp_shard = 0;
};

constexpr double kPipeClip = 0.5;

/// Norm before clipping of each step, in front of the losses.
PipeTrace train_pipe_dp(const PipeDpSetting& s) {
  PipeTrace trace;
  const std::string name = s.schedule;
  const Placement placement = name == "zb-v" || name == "dualpipe-v" ? Placement::v : Placement::loop;
  testing::on_threads(s.pp * s.dp, [&](World& world) {
    const Mesh mesh(world, {{"pp", s.pp}, {"dp", s.dp}});
    Stages stages = cut(testing::pipe_model(5, s.model), mesh["pp"], {.chunks = s.chunks, .placement = placement});
    const auto loss = [&](const at::Tensor& out, const at::Tensor& target) {
      return testing::pipe_loss(out, target) * (s.sums ? static_cast<double>(target.size(0)) : 1.0);
    };
    Pipeline pipe(std::move(stages), schedule::maker(s.schedule), mesh["pp"], loss, {.unsplit = s.model == PipeModel::tied ? Unsplit::with_input : Unsplit::refuse});
    if (s.recompute) set_recompute(*pipe.module(), {.mode = Recompute::full});
    DataParallel dp(pipe.module(), mesh["dp"], {.sharding = s.sharding, .dp_shard = s.dp_shard, .grad_scale = s.sums ? GradScale::sum : GradScale::mean_over_ranks,
                                                .stages = mesh["pp"], .counted_elsewhere = pipe.counted_elsewhere()});
    pipe.reduce_with(dp);
    std::vector<at::Tensor> shards;
    for (const NamedTensor& shard : dp.shards()) shards.push_back(shard.tensor);
    torch::optim::SGD optimizer(shards, torch::optim::SGDOptions(0.01).momentum(0.9));
    for (int64_t step = 0; step < testing::kPipeSteps; ++step) {
      const auto data = testing::pipe_data(s.model, step);
      const int64_t rows = testing::kPipeRows / s.dp, begin = mesh.coord("dp") * rows;
      StepOptions options{.micro_batches = s.micro_batches, .count = s.sums ? testing::kPipeRows : 0};
      const PipelineResult result = pipe.step(data.inputs.narrow(0, begin, rows), data.targets.narrow(0, begin, rows), options);
      const double norm = dp.clip_grad_norm(kPipeClip);
      if (world.rank() == world.size() - 1) trace.losses.insert(trace.losses.end(), {norm, result.loss});
      if (step + 1 == testing::kPipeSteps) {
        static std::mutex mutex;
        for (const NamedTensor& g : parallel::whole_gradients(dp)) {
          const std::lock_guard lock(mutex);
          trace.gradients[g.name] = g.tensor.clone();
        }
      }
      dp.step(optimizer);
      dp.zero_grad();
    }
    const auto full = dp.gather_full();
    testing::note_tensors(trace.weights, *pipe.module(), false);
  });
  return trace;
}

PipeTrace clipped_reference(PipeModel model) {
  torch::nn::Sequential net = testing::pipe_model(5, model);
  torch::optim::SGD optimizer = testing::pipe_optimizer(*net);
  PipeTrace trace;
  for (int64_t step = 0; step < testing::kPipeSteps; ++step) {
    optimizer.zero_grad();
    const auto data = testing::pipe_data(model, step);
    const at::Tensor loss = testing::pipe_loss(net->forward(data.inputs), data.targets);
    loss.backward();
    const double norm = torch::nn::utils::clip_grad_norm_(optimizer.param_groups()[0].params(), kPipeClip);
    trace.losses.insert(trace.losses.end(), {norm, loss.item<double>()});
    if (step + 1 == testing::kPipeSteps) testing::note_tensors(trace.gradients, *net, true);
    optimizer.step();
  }
  testing::note_tensors(trace.weights, *net, false);
  return trace;
}

void expect_dp_parity(const PipeDpSetting& s) {
  SCOPED_TRACE(fmt::format("{}: pp {} x dp {} x {} chunks, {} micro-batches, zero {}, model {}, sums {}, recompute {}", s.schedule, s.pp, s.dp, s.chunks,
                           s.micro_batches, static_cast<int>(s.sharding), static_cast<int>(s.model), s.sums, s.recompute));
  PipeTrace found = train_pipe_dp(s), expected = clipped_reference(s.model);
  // A tied weight is listed under its first name alone.
  for (PipeTrace* t : {&found, &expected}) {
    if (s.model == PipeModel::tied) t->gradients.erase("6.weight");
  }
  testing::expect_same(found, expected);
}

TEST(PipelineWithDataParallel, EqualsOneRank) {
  const PipeDpSetting settings[] = {
      {"1f1b", 2, 2, 1, 3, Sharding::none},
      {"1f1b", 2, 2, 1, 4, Sharding::parameters},
      {"zb-h1", 2, 2, 1, 3, Sharding::optimizer, PipeModel::linear, true},
      {"zb-h1", 3, 2, 1, 4, Sharding::parameters, PipeModel::linear, false, true},
      {"zb-v", 2, 2, 2, 4, Sharding::parameters, PipeModel::linear, true, true},
      {"interleaved", 2, 2, 2, 4, Sharding::gradients, PipeModel::tied},
      {"zb-h1", 2, 3, 1, 2, Sharding::none, PipeModel::tied, true},
      {"1f1b", 3, 2, 1, 5, Sharding::parameters, PipeModel::tied},
      {"dualpipe-v", 2, 2, 2, 5, Sharding::gradients, PipeModel::linear, false, true},
      {"gpipe", 2, 4, 1, 3, Sharding::parameters, PipeModel::linear, true, false, 2},
  };
  for (const PipeDpSetting& s : settings) {
    expect_dp_parity(s);
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace weft
