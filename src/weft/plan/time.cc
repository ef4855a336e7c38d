// Step time in closed form: action times per stage, pipeline fill, data-parallel tails, optimizer.
#include <algorithm>
#include <cmath>

#include "weft/plan/estimate.h"

namespace weft::plan {
namespace {

using cost::BlockWork;
using cost::Context;
using cost::Work;

/// One part of the pipeline: what its micro-batch costs and how the cost is made up.
struct Part {
  Work forward, input, weight, recompute;
  double host_forward = 0, host_backward = 0;  ///< seconds that the host needs to start the kernels
  double dense = 0, expert = 0;                ///< parameters on this rank
  double layers = 0;

  void add(const BlockWork& work, double times) {
    forward += times * work.forward;
    input += times * work.input;
    weight += times * work.weight;
    recompute += times * work.recompute;
  }
  double forward_time() const { return std::max(forward.total(), host_forward); }
  double backward_time() const { return std::max(recompute.total() + input.total() + weight.total(), host_backward); }
};

/// Everything of one evaluation that does not depend on the pipeline part.
struct Evaluation {
  const Job& job;
  const cost::Tuning& tuning;
  Context context;
  std::vector<BlockWork> kinds;
  BlockWork head, embedding;

  Evaluation(const Job& j, const cost::Tuning& t)
      : job(j), tuning(t), context(Context::of(j.layout, j.machine, j.software, t, static_cast<double>(j.sequence), j.precision, j.model.layer_norm)) {
    for (const ModelSummary::Kind& kind : job.model.kinds) kinds.push_back(cost::block_work(kind.block, job.model.hidden, context));
    head = cost::head_work(job.model.hidden, job.model.vocab, context);
    embedding = cost::embedding_work(job.model.hidden, job.model.vocab, context);
  }

  double block_parameters(const ModelSummary::Kind& kind) const { return kind.dense_parameters / static_cast<double>(job.layout.tp) + kind.replicated; }
  double block_expert_parameters(const ModelSummary::Kind& kind) const { return kind.expert_parameters / static_cast<double>(job.layout.ep * job.layout.etp); }

  std::vector<Part> parts() const;
  void finish(Part& part) const;
};

void Evaluation::finish(Part& part) const {
  if (job.software.graphs) return;
  const double op = 1e-6 * tuning.host_op_us;
  part.host_forward = part.forward.launches * op;
  part.host_backward = (part.input.launches + part.weight.launches + part.recompute.launches) * op;
  if (job.software.python_checkpoint) part.host_backward += part.layers * 1e-6 * tuning.checkpoint_host_us;
}

std::vector<Part> Evaluation::parts() const {
  const layout::Layout& layout = job.layout;
  const std::vector<int64_t> split = layout::split_layers(static_cast<int64_t>(job.model.kind_of_layer.size()), layout.pp, layout.chunks);
  std::vector<Part> parts(split.size());
  size_t layer = 0;
  for (size_t index = 0; index < split.size(); ++index) {
    Part& part = parts[index];
    // Runs of equal blocks are added at once: most models have one kind.
    for (int64_t left = split[index]; left > 0;) {
      const int kind = job.model.kind_of_layer[layer];
      int64_t run = 1;
      while (run < left && job.model.kind_of_layer[layer + static_cast<size_t>(run)] == kind) ++run;
      part.add(kinds[static_cast<size_t>(kind)], static_cast<double>(run));
      const ModelSummary::Kind& of = job.model.kinds[static_cast<size_t>(kind)];
      part.dense += static_cast<double>(run) * block_parameters(of);
      part.expert += static_cast<double>(run) * block_expert_parameters(of);
      part.layers += static_cast<double>(run);
      layer += static_cast<size_t>(run);
      left -= run;
    }
  }
  const double tp = static_cast<double>(layout.tp);
  parts.front().add(embedding, 1);
  parts.front().dense += job.model.embedding_parameters / tp;
  Part& last = parts.back();
  last.add(head, 1);
  if (!job.model.tied || layout.pp > 1) last.dense += job.model.head_parameters / tp;
  if (job.model.mtp_layers > 0) {
    last.add(kinds.back(), job.model.mtp_layers);
    last.add(head, job.model.mtp_layers);
    last.dense += job.model.mtp_layers * block_parameters(job.model.kinds.back());
    last.expert += job.model.mtp_layers * block_expert_parameters(job.model.kinds.back());
  }
  for (Part& part : parts) finish(part);
  return parts;
}

/// Sums of a rank's chunks.
struct Rank {
  double forward = 0, backward = 0, weight = 0, dense = 0, expert = 0;
  double busy() const { return forward + backward; }
};

std::vector<Rank> ranks_of(const std::vector<Part>& parts, const layout::Layout& layout) {
  std::vector<Rank> ranks(static_cast<size_t>(layout.pp));
  for (size_t index = 0; index < parts.size(); ++index) {
    Rank& rank = ranks[index % ranks.size()];
    rank.forward += parts[index].forward_time();
    rank.backward += parts[index].backward_time();
    rank.weight += parts[index].weight.total();
    rank.dense += parts[index].dense;
    rank.expert += parts[index].expert;
  }
  return ranks;
}

/// How much of 1F1B's fill and drain a schedule leaves, given backward's weight share (zero-bubble schedules move W into it).
double bubble_factor(const std::string& schedule, const Rank& mean) {
  const double one = mean.busy();
  if (one <= 0) return 1;
  if (schedule == "zb-h1") return std::max(0.0, (one - 2 * mean.weight) / one);
  if (schedule == "zb-h2" || schedule == "zb-v") return std::max(0.0, (one - 3 * mean.weight) / one);
  return 1;
}

cost::Group pipeline_group(const Job& job, const cost::Tuning& tuning) {
  return cost::group_of(job.machine, job.layout.pp, job.layout.tp * job.layout.cp * job.layout.dp, tuning);
}

/// One activation to the next stage: every tensor-parallel rank sends its part of it, and gathers when the tensor is whole.
double send_seconds(const Job& job, const Context& context, const cost::Tuning& tuning) {
  if (job.layout.pp <= 1) return 0;
  const double bytes = 2 * context.tokens * job.model.hidden / (job.software.whole_sends ? 1 : context.tp.ranks);
  const cost::Group group = pipeline_group(job, tuning);
  double seconds = cost::send_time(bytes, group, group.per_domain < group.ranks);
  if (!job.layout.sequence_parallel && !job.software.whole_sends) seconds += cost::all_gather_time(2 * context.tokens * job.model.hidden, context.tp);
  return seconds;
}

/// Bytes per gradient element on the wire.
double gradient_bytes(const Job& job) { return job.software.gradients == machine::Software::Gradients::fp32 ? 4 : 2; }

/// Megatron's rule: 40 million parameters, or a million per rank so that large rings do not pay latency alone.
double bucket_count(double parameters, int64_t ranks) { return std::max(1.0, std::round(parameters / std::max(40e6, 1e6 * static_cast<double>(ranks)))); }

struct DataParallel {
  double reduce = 0, gather = 0, unoverlappable = 0;
};

/// Reduction and parameter gather of one step for zero <= 2.
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

/// FSDP: gather before forward and backward, reduce-scatter after backward, for every micro-batch, one block ahead.
struct ShardedStep {
  double exposed = 0;   ///< per micro-batch
  double contention = 0;
};

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
    const BlockWork& work = run.kinds[index];
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
    out.exposed += static_cast<double>(kind.count) * (exposed + cost::stream_time((parameters + experts) * 16, run.context.rates));
    out.contention += static_cast<double>(kind.count) * overlapped * run.tuning.sharded_slowdown;
  }
  // Embedding and head are units of their own; the first gather and the last reduction have nothing to hide behind.
  const double ends = (job.model.embedding_parameters) / static_cast<double>(layout.tp);
  out.exposed += cost::all_gather_time(2 * ends, group) + (job.software.frozen_base ? 0 : cost::all_gather_time(gradient * ends, group));
  out.exposed /= static_cast<double>(layout.pp);
  out.contention /= static_cast<double>(layout.pp);
  return out;
}

/// Adam over the rank's share: gradient 4, master 8, moments 16, weight 2, plus norm, clip and clearing.
double optimizer_seconds(const Job& job, const Rank& rank, const Context& context) {
  if (job.software.frozen_base) return 0;
  const layout::Layout& layout = job.layout;
  const double shard = layout.zero >= 1 ? static_cast<double>(layout.shard_ranks()) : 1;
  const double expert_shard = layout.zero >= 1 ? static_cast<double>(std::max<int64_t>(1, layout.expert_dp())) : 1;
  const double whole = layout.zero >= 2 ? 0 : rank.dense + rank.expert;
  return ((rank.dense / shard + rank.expert / expert_shard) * 42 + whole * 4) / context.rates.memory;
}

void add_terms(Time& time, const Part& part, double micro_batches) {
  for (const Work* work : {&part.forward, &part.input, &part.weight}) {
    time.gemm += micro_batches * work->gemm;
    time.attention += micro_batches * work->attention;
    time.memory += micro_batches * work->memory;
    time.tp += micro_batches * work->tp;
    time.cp += micro_batches * work->cp;
    time.ep += micro_batches * work->ep;
  }
  time.recompute += micro_batches * part.recompute.total();
  time.host += micro_batches * (part.forward_time() + part.backward_time() - part.forward.total() - part.recompute.total() - part.input.total() - part.weight.total());
}

}  // namespace

Time step_time(const Job& job, const cost::Tuning& tuning) {
  const Evaluation run(job, tuning);
  const layout::Layout& layout = job.layout;
  const std::vector<Part> parts = run.parts();
  const std::vector<Rank> ranks = ranks_of(parts, layout);
  const double m = static_cast<double>(std::max<int64_t>(1, layout.micro_batches())), p = static_cast<double>(layout.pp), v = static_cast<double>(layout.chunks);

  size_t slowest = 0;
  Rank mean;
  for (size_t index = 0; index < ranks.size(); ++index) {
    if (ranks[index].busy() > ranks[slowest].busy()) slowest = index;
    mean.forward += ranks[index].forward / p;
    mean.backward += ranks[index].backward / p;
    mean.weight += ranks[index].weight / p;
  }
  Time time;
  for (size_t index = slowest; index < parts.size(); index += ranks.size()) add_terms(time, parts[index], m);

  // Fill and drain: every other rank once, over the chunks.
  time.bubble = std::max(0.0, p * mean.busy() - ranks[slowest].busy()) / v * bubble_factor(layout.schedule, mean);
  const double send = send_seconds(job, run.context, tuning);
  time.pp = 2 * (p - 1) * send;
  if (!job.software.overlap_pp && layout.pp > 1) time.pp += 2 * m * v * send;

  if (layout.zero == 3 || (layout.zero == 2 && layout.pp == 1 && m > 1)) {
    const ShardedStep sharded = sharded_seconds(run);
    time.dp = m * (sharded.exposed + sharded.contention);
  } else {
    const DataParallel dp = data_parallel_seconds(job, ranks[slowest], tuning);
    time.dp = dp.reduce + dp.gather + dp.unoverlappable;
    if (job.software.overlap_dp) {
      // Reduction hides under the last micro-batch's backward, the gather under the first forward; one bucket each stays.
      const double tail = 1 / bucket_count(ranks[slowest].dense, layout.dp * layout.cp);
      // With interleaving a chunk's gradients are complete while the other chunks still run their last p micro-batches.
      const double window = v > 1 ? 1 + (std::min(m, p) - 1) * (1 - 1 / v) : 1;
      const double reduce = std::max(dp.reduce * tail, dp.reduce - ranks[slowest].backward * window * (1 - tail));
      const double gather = !job.software.overlap_gather ? dp.gather : std::max(dp.gather * tail, dp.gather - ranks[slowest].forward * window * (1 - tail));
      const double overlapped = dp.reduce + dp.gather - reduce - gather;
      time.dp = reduce + gather + dp.unoverlappable + tuning.overlap_slowdown * overlapped;
    }
  }
  time.optimizer = optimizer_seconds(job, ranks[slowest], run.context);
  time.fixed = 1e-3 * tuning.step_fixed_ms;
  const double sum = time.gemm + time.attention + time.memory + time.host + time.recompute + time.tp + time.cp + time.ep + time.pp + time.dp + time.bubble + time.optimizer + time.fixed;
  // Every step waits for the slowest device; the spread grows with the logarithm of their number.
  const double wait = sum * tuning.straggler * std::log2(std::max(1.0, static_cast<double>(layout.devices())));
  time.fixed += wait;
  time.step = sum + wait;
  // p95 over median on large systems lies between 1.00 and 1.07.
  time.step_p95 = time.step * 1.03;
  return time;
}

std::vector<StageTimes> stage_times(const Job& job, const cost::Tuning& tuning) {
  const Evaluation run(job, tuning);
  const double send = send_seconds(job, run.context, tuning);
  std::vector<StageTimes> out;
  for (const Part& part : run.parts()) {
    StageTimes times;
    times.forward = part.forward_time();
    times.weight = part.weight.total();
    times.input = std::max(0.0, part.backward_time() - times.weight);
    times.send = send;
    times.layers = static_cast<int64_t>(part.layers);
    out.push_back(times);
  }
  return out;
}

}  // namespace weft::plan
