// Data-parallel communication of one step: gradient reduction, parameter gathers.
#include <cmath>

#include "weft/plan/evaluation.h"

namespace weft::plan {
namespace {

/// Bytes per gradient element on the wire.
double gradient_bytes(const Job& job) { return job.software.gradients == machine::Software::Gradients::fp32 ? 4 : 2; }

}  // namespace

cost::Group pipeline_group(const Job& job, const cost::Tuning& tuning) {
  return cost::group_of(job.machine, job.layout.pp, job.layout.tp * job.layout.cp * job.layout.dp, tuning);
}

/// Megatron's rule: 40 million parameters, or a million per rank so that large rings do not pay latency alone.
double bucket_count(double parameters, int64_t ranks) { return std::max(1.0, std::round(parameters / std::max(40e6, 1e6 * static_cast<double>(ranks)))); }

DataParallel data_parallel_seconds(const Job& job, const Rank& rank, const cost::Tuning& tuning) {
  DataParallel out;
  const layout::Layout& layout = job.layout;
  if (job.software.frozen_base) return out;
  const double gradient = gradient_bytes(job);
  const auto add = [&](double parameters, int64_t ranks, int64_t stride) {
    if (parameters <= 0 || ranks <= 1) return;
    const cost::Group group = cost::group_of(job.machine, ranks, stride, tuning);
    // Bucket by bucket: every bucket pays the latency of the ring.
    const double buckets = bucket_count(parameters, ranks), bucket = parameters / buckets;
    if (layout.zero == 0) {
      out.reduce += buckets * cost::all_reduce_time(gradient * bucket, group);
    } else if (layout.shard_group > 0 && layout.shard_group < ranks) {
      out.reduce += buckets * cost::all_reduce_time(gradient * bucket, group);
      out.gather += buckets * cost::all_gather_time(2 * bucket, cost::group_of(job.machine, layout.shard_group, stride, tuning));
    } else {
      out.reduce += buckets * cost::all_gather_time(gradient * bucket, group);
      out.gather += buckets * cost::all_gather_time(2 * bucket, group);
    }
  };
  add(rank.dense, layout.dp * layout.cp, layout.tp);
  add(rank.expert, layout.expert_dp(), layout.ep * layout.etp);
  // The tied copies of the first and the last stage are summed after everything else.
  if (job.model.tied && layout.pp > 1)
    out.unoverlappable += cost::all_reduce_time(gradient * job.model.head_parameters / static_cast<double>(layout.tp), pipeline_group(job, tuning)) ;
  return out;
}

ShardedStep sharded_seconds(const Evaluation& run) {
  const Job& job = run.job;
  const layout::Layout& layout = job.layout;
  ShardedStep out;
  const int64_t shard = layout.shard_ranks();
  const cost::Group group = cost::group_of(job.machine, shard, layout.tp, run.tuning);
  const int64_t replicas = layout.dp * layout.cp / shard;
  const cost::Group across = cost::group_of(job.machine, replicas, layout.tp * shard, run.tuning);
  // torch reduces in fp32 by default when parameters are kept in fp32; gathers are 16 bit.
  const double gradient = gradient_bytes(job);
  for (size_t index = 0; index < run.kinds.size(); ++index) {
    const ModelSummary::Kind& kind = job.model.kinds[index];
    const cost::BlockWork& work = run.kinds[index];
    const double parameters = run.block_parameters(kind), experts = run.block_expert_parameters(kind);
    const cost::Group expert_group = cost::group_of(job.machine, std::max<int64_t>(1, layout.expert_dp()), layout.ep * layout.etp, run.tuning);
    const double gather = cost::all_gather_time(2 * parameters, group) + cost::all_gather_time(2 * experts, expert_group);
    double reduce = cost::all_gather_time(gradient * parameters, group) + cost::all_gather_time(gradient * experts, expert_group);
    reduce += cost::all_reduce_time(gradient * parameters / static_cast<double>(shard), across);
    const double forward = work.forward.total(), backward = work.recompute.total() + work.input.total() + work.weight.total();
    if (job.software.frozen_base) reduce = 0;
    const double again = layout.zero == 3 ? gather : 0;
    double exposed = std::max(0.0, (layout.zero == 3 ? gather : 0) - forward) + std::max(0.0, again + reduce - backward);
    if (!job.software.overlap_dp) exposed = (layout.zero == 3 ? gather : 0) + again + reduce;
    const double overlapped = (layout.zero == 3 ? 2 * gather : 0) + reduce - exposed;
    // Copies between the flat communication buffers and the parameters: out of both gathers, into the reduction.
    if (job.software.sharded_copies) exposed += cost::stream_time((parameters + experts) * 16, run.context.rates);
    out.exposed += static_cast<double>(kind.count) * exposed;
    out.contention += static_cast<double>(kind.count) * overlapped * cost::slowdown_of(cost::kCollectiveChannels, job.machine);
  }
  // Embedding and head are units of their own; the first gather and the last reduction have nothing to hide behind.
  const double ends = (job.model.embedding_parameters) / static_cast<double>(layout.tp);
  out.exposed += cost::all_gather_time(2 * ends, group) + (job.software.frozen_base ? 0 : cost::all_gather_time(gradient * ends, group));
  out.exposed /= static_cast<double>(layout.pp);
  out.contention /= static_cast<double>(layout.pp);
  return out;
}

}  // namespace weft::plan
