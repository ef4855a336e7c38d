// One evaluation of the time model, part by part; shared by the files that add up a step.
#pragma once

#include <algorithm>
#include <vector>

#include "weft/plan/estimate.h"

namespace weft::plan {

/// One part of the pipeline: what its micro-batch costs and how the cost is made up.
struct Part {
  cost::Work forward, input, weight, recompute;
  double host_forward = 0, host_backward = 0;  ///< seconds that the host needs to start the kernels
  double dense = 0, expert = 0;                ///< parameters on this rank
  double layers = 0;

  void add(const cost::BlockWork& work, double times) {
    forward += times * work.forward;
    input += times * work.input;
    weight += times * work.weight;
    recompute += times * work.recompute;
  }
  bool take_turns = false;                     ///< Software::blocking_launches

  double together(double device, double host) const { return take_turns ? device + host : std::max(device, host); }
  double forward_time() const { return together(forward.total(), host_forward); }
  double backward_time() const { return together(recompute.total() + input.total() + weight.total(), host_backward); }
};

/// Everything of one evaluation that does not depend on the pipeline part.
struct Evaluation {
  const Job& job;
  const cost::Tuning& tuning;
  cost::Context context;
  std::vector<cost::BlockWork> kinds;
  cost::BlockWork head, embedding;

  Evaluation(const Job& job, const cost::Tuning& tuning);

  double block_parameters(const ModelSummary::Kind& kind) const { return kind.dense_parameters / static_cast<double>(job.layout.tp) + kind.replicated; }
  double block_expert_parameters(const ModelSummary::Kind& kind) const { return kind.expert_parameters / static_cast<double>(job.layout.ep * job.layout.etp); }

  std::vector<Part> parts() const;
  /// What the last part computes besides its blocks, in blocks.
  double last_part_blocks() const;
  void finish(Part& part) const;
};

/// Sums of a rank's chunks.
struct Rank {
  double forward = 0, backward = 0, weight = 0, dense = 0, expert = 0;
  double busy() const { return forward + backward; }
};

/// The stages of one pipeline as a communicating group.
cost::Group pipeline_group(const Job& job, const cost::Tuning& tuning);

/// Buckets of a gradient reduction; see reduction.cc for the rule.
double bucket_count(double parameters, int64_t ranks);

struct DataParallel {
  double reduce = 0, gather = 0, unoverlappable = 0;
};

/// Reduction and parameter gather of one step for zero <= 2.
DataParallel data_parallel_seconds(const Job& job, const Rank& rank, const cost::Tuning& tuning);

/// FSDP: gather before forward and backward, reduce-scatter after backward, for every micro-batch, one block ahead.
struct ShardedStep {
  double exposed = 0;   ///< per micro-batch
  double contention = 0;
};

ShardedStep sharded_seconds(const Evaluation& run);

}  // namespace weft::plan
