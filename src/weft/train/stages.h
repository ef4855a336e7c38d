// Pipeline parallelism in a training run (docs/pipeline.md): which rank trains which stretch of the model, and what comes together again.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "weft/models/stages.h"
#include "weft/parallel/pipeline/pipeline.h"
#include "weft/train/job.h"

namespace weft::train {

/// Follows from the configuration alone.
struct StagePlan {
  std::vector<models::StagePart> parts;  ///< all of the model, by stage
  std::vector<int> owner;                ///< by stage
  schedule::Maker maker;

  std::vector<models::StagePart> of_rank(int rank) const { return models::parts_of_rank(parts, owner, rank); }
};
StagePlan stage_plan(const Job& job);

/// "stages: 0 on rank 0: embedding, layers 0-2; 1 on rank 1: layers 3-5, head".
std::string to_text(const StagePlan& plan);

/// Forward and backward over the micro-batches, whose losses are divided by `tokens`; gradients times `gradient_scale`. Returns the sum of the
/// losses of all of them, on every rank of the pipeline, and the `bubble` that was measured. Collective over it. `update`: its number, for dropout.
double run_pipeline(Pipeline& pipeline, models::Transformer& model, const std::vector<data::Batch>& batches, int64_t tokens, int64_t update,
                    double gradient_scale, std::optional<double>& bubble);
/// Forward alone; batches with `counts` = false take part and count nothing.
double evaluate_pipeline(Pipeline& pipeline, models::Transformer& model, const std::vector<data::Batch>& batches, const std::vector<bool>& counts);

/// What the ranks of a pipeline hold of a list of named tensors (undefined ones, too), together on rank 0; other ranks get nothing. In the order of `names`, of which
/// those that nobody has are left out; without names, rank by rank. Of a tensor on several ranks the first counts; `copies`, if given, gets how far they are
/// apart (max |a - b| / max |a|). Collective over `pp`.
std::vector<NamedTensor> gather_stages(const std::vector<NamedTensor>& mine, const Comm& pp, std::vector<std::string> names = {},
                                       std::vector<std::pair<std::string, double>>* copies = nullptr);
/// Names of all parameters of the job's model, in order.
std::vector<std::string> parameter_names(const Job& job);

/// Share of the ranks' time outside of compute that the schedule has when stages are equal and F, I and W take the same time.
double planned_bubble(const schedule::Schedule& schedule);

}  // namespace weft::train
