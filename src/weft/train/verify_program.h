// weft::verify for programs with modules of their own: the same steps under several layouts, compared with one rank.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/comm/world.h"
#include "weft/parallel/data_parallel.h"
#include "weft/train/verify_report.h"

namespace torch::nn {
class Module;
}

namespace weft {

/// One rank's place under one layout. The reference gets groups of one rank.
struct VerifyRanks {
  Comm dp;  ///< ranks with other samples
  Comm tp;  ///< ranks that share the module out: for weft::parallelize
  bool sequence_parallel = false;
};

/// What is verified: a module as weft::DataParallel takes it, and its loss.
struct VerifyProgram {
  std::shared_ptr<torch::nn::Module> module;
  /// Sum of the losses of the samples that `batch` has (dim 0 of each tensor), a scalar. verify() divides by the samples of all ranks.
  std::function<at::Tensor(const std::vector<at::Tensor>& batch)> loss_sum;
  /// loss_sum is that of this rank's part of the sequence: the losses of the tensor-parallel ranks add up.
  bool loss_of_part = false;
};

struct VerifyOptions {
  int64_t steps = 3;
  double tolerance = 0;        ///< largest relative difference that is rounding; 0: as train::make_report()
  double clip_norm = 0;        ///< 0: gradients are not clipped
  double learning_rate = 1e-3;
  /// Over dp.shards(). Empty: AdamW, matrices decay by 0.1, eps 1e-6 (fp64) or 1e-4, so that gradients that are zero but for rounding do not
  /// move weights.
  std::function<std::unique_ptr<torch::optim::Optimizer>(const DataParallel& dp)> make_optimizer;
  DataParallelOptions data_parallel;  ///< what layouts do not say; the gradient is that of the sum over ranks
  /// The ranks of a job that was started with several (weft run, torchrun, srun, mpirun). Empty, or of one rank: ranks are threads of this
  /// process, on which make_model and make_batch are called at the same time.
  std::optional<World> world;
};

/// Builds the module under each layout: equal on all ranks, with parallelize() over ranks.tp where that has several. Built under
/// weft::deferred its start values are compared, too; others are given those of the reference.
using MakeModel = std::function<VerifyProgram(const VerifyRanks& ranks)>;
/// The global batch of a step, the same on every rank: tensors whose dim 0 are the samples.
using MakeBatch = std::function<std::vector<at::Tensor>(int64_t step)>;

/// Trains options.steps steps on one rank and under each of `layouts` ("dp=2; tp=2; dp_shard=2,zero=3,tp=2": train::split_layouts(), short
/// names alone), and compares losses, norms, every gradient and the weights as whole tensors with the reference, and between ranks
/// what must be equal there. The same report on every rank; print to_text() or to_json(). Use fp64, where rounding hides no fault.
///
///   auto report = weft::verify(
///       [](const weft::VerifyRanks& ranks) {
///         auto net = weft::deferred([] { return Net(); }, {.seed = 1});
///         weft::parallelize(*net, ranks.tp, plan);
///         return weft::VerifyProgram{net.ptr(), [net](const auto& batch) mutable { return loss(net(batch[0]), batch[1]); }};
///       },
///       [](int64_t step) { return batch_of(step); }, "dp=2; tp=2; dp=2,zero=3,tp=2");
///   std::cout << weft::to_text(report);
///   return report.ok() ? 0 : 1;
///
/// Ranks as threads: a layout that throws is a row. Ranks as processes: layouts that need another number of ranks are rows (fewer that divide
/// it run side by side), and an exception ends the job. ConfigError for layouts that are not understood, a batch with fewer
/// samples than ranks, a reference that cannot be trained or does not learn, and a `tp` over which nothing is shared out.
VerifyReport verify(const MakeModel& make_model, const MakeBatch& make_batch, const std::string& layouts, const VerifyOptions& options = {});

}  // namespace weft
