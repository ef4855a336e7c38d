// Step time in closed form: action times per stage, pipeline fill, data-parallel tails, optimizer.
#include <algorithm>
#include <cmath>

#include "weft/cost/offload.h"
#include "weft/plan/evaluation.h"

namespace weft::plan {
namespace {

using cost::Context;
using cost::Work;

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

/// One activation to the next stage: every tensor-parallel rank sends its part of it, and gathers when the tensor is whole.
/// The mean over boundaries, of which only some leave a link domain; senders that wait go at the pace of the slowest.
double send_seconds(const Job& job, const Context& context, const cost::Tuning& tuning) {
  if (job.layout.pp <= 1) return 0;
  const double bytes = 2 * context.tokens * job.model.hidden / (job.software.whole_sends ? 1 : context.tp.ranks);
  const cost::Group group = pipeline_group(job, tuning);
  const double leaving = job.software.overlap_pp || group.domains() <= 1 ? (group.domains() - 1) / (group.ranks - 1) : 1;
  double seconds = leaving * cost::send_time(bytes, group, true) + (1 - leaving) * cost::send_time(bytes, group, false);
  if (!job.layout.sequence_parallel && !job.software.whole_sends) seconds += cost::all_gather_time(2 * context.tokens * job.model.hidden, context.tp);
  return seconds;
}

/// Memory bandwidth of a host with two sockets of eight DDR5-4800 channels: 614 GB/s by data sheet, two thirds in practice.
constexpr double kHostMemory = 400e9;

/// Adam over the rank's share: gradient 4, master 8, moments 16, weight 2, plus norm, clip and clearing. Offloaded: gradients go
/// to the host, which shares its memory among its devices, and weights come back, bucket by bucket; the slowest part counts.
double optimizer_seconds(const Job& job, const Rank& rank, const Context& context) {
  if (job.software.frozen_base) return 0;
  const layout::Layout& layout = job.layout;
  const double shard = layout.zero >= 1 ? static_cast<double>(layout.shard_ranks()) : 1;
  const double expert_shard = layout.zero >= 1 ? static_cast<double>(std::max<int64_t>(1, layout.expert_dp())) : 1;
  const double whole = layout.zero >= 2 ? 0 : rank.dense + rank.expert, share = rank.dense / shard + rank.expert / expert_shard;
  if (!layout.offload) return (share * 42 + whole * 4) / context.rates.memory;
  const double link = 1e9 * job.machine.device.host_gbps, host = kHostMemory / static_cast<double>(job.machine.node_devices);
  const cost::OffloadBytes bytes{.in = 4 * share, .update = 28 * share, .out = 2 * share};
  return cost::offload_seconds(bytes, {.in = link, .update = host, .out = link}) + whole * 4 / context.rates.memory;
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

double straggler_share(const layout::Layout& layout, const cost::Tuning& tuning) {
  return tuning.straggler * std::log2(std::max(1.0, static_cast<double>(layout.devices())));
}

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
  // In between they hide, but their channels take multiprocessors from the chunk that runs.
  if (layout.pp > 1) time.pp += 2 * m * v * send * (job.software.overlap_pp ? cost::slowdown_of(cost::kSendChannels, job.machine) : 1);

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
  if (!job.machine.device.calibrated) time.fixed = 1e-3 * tuning.step_fixed_ms;  // of Python; contained in what was measured
  const double sum = time.gemm + time.attention + time.memory + time.host + time.recompute + time.tp + time.cp + time.ep + time.pp + time.dp + time.bubble + time.optimizer + time.fixed;
  const double wait = sum * straggler_share(layout, tuning);
  time.fixed += wait;
  time.step = sum + wait;
  time.step_p95 = kP95OverMedian * time.step;
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
