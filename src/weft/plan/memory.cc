// Peak memory of every pipeline stage in closed form.
#include <algorithm>
#include <cmath>

#include "weft/cost/memory.h"
#include "weft/layout/part.h"
#include "weft/plan/estimate.h"

namespace weft::plan {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;

/// Parameters and activations of one stage: what its layers add up to.
struct StageShare {
  double dense = 0, expert = 0;      ///< parameters on one rank, unsharded over data parallelism
  double kept = 0;                   ///< activations of one micro-batch over all chunks of the stage
  double largest_block = 0;          ///< activations of the largest block, alive while it is recomputed
  double largest_matrix = 0;         ///< parameters of the largest matrix product, for its weight gradient
  double largest_unit = 0;           ///< parameters of the largest block
  double backward = 0;               ///< gradients inside a block's backward that are alive at once
};

struct Shares {
  std::vector<StageShare> stages;
  double embedding = 0, head = 0;
};

cost::ActivationShape shape_of(const Job& job, const cost::Tuning& tuning) {
  const layout::Layout& layout = job.layout;
  cost::ActivationShape shape;
  shape.sequence = static_cast<double>(job.sequence);
  shape.tokens = shape.sequence * static_cast<double>(layout.micro_batch) / static_cast<double>(layout.cp);
  shape.tp = static_cast<double>(layout.tp);
  shape.sequence_parallel = layout.sequence_parallel;
  shape.low_precision = job.software.low_precision_saved && (job.precision == machine::Precision::fp8 || job.precision == machine::Precision::fp4);
  shape.etp = static_cast<double>(layout.etp);
  shape.imbalance = tuning.expert_imbalance;
  return shape;
}

/// Bytes of an activation.
double element_bytes(const Job& job) { return job.precision == machine::Precision::fp32 ? 4 : 2; }

double fc1_parameters(const model::BlockSpec& block, double hidden, const layout::Layout& layout) {
  const double matrices = block.mlp.gated ? 2 : 1;
  if (block.moe) {
    const double experts = static_cast<double>(block.moe->experts) / static_cast<double>(layout.ep);
    return matrices * hidden * experts * static_cast<double>(block.moe->expert_ffn) / static_cast<double>(layout.etp);
  }
  return matrices * hidden * static_cast<double>(block.mlp.ffn) / static_cast<double>(layout.tp);
}

/// Weights of attention's projections that the fullest tensor-parallel rank has above an even share: where heads do not divide, and where
/// ranks hold copies of key heads.
double uneven_heads(const model::AttentionSpec& attention, double hidden, int64_t tp) {
  if (attention.latent) return 0;
  const layout::HeadCounts most = layout::most_heads(attention, tp);
  const double ranks = static_cast<double>(tp), queries = most.queries - static_cast<double>(attention.heads) / ranks;
  const double keys = most.keys - static_cast<double>(attention.kv_heads) / ranks;
  return 2 * hidden * static_cast<double>(attention.head_dim) * (queries + keys);
}

/// One block of a kind on one rank.
struct KindShare {
  double dense = 0, expert = 0, kept = 0, block = 0, matrix = 0, backward = 0;
};

KindShare kind_share(const ModelSummary::Kind& kind, const Job& job, const cost::ActivationShape& shape, bool flash) {
  const layout::Layout& layout = job.layout;
  const cost::BlockBytes bytes = cost::block_bytes(kind.block, job.model.hidden, job.model.layer_norm, shape, job.software);
  KindShare share;
  share.dense = kind.dense_parameters / static_cast<double>(layout.tp) + kind.replicated + uneven_heads(kind.block.attention, job.model.hidden, layout.tp);
  share.expert = kind.expert_parameters / static_cast<double>(layout.ep * layout.etp);
  const double wide = element_bytes(job) / 2;  // activations are counted in 16 bit
  share.kept = wide * cost::kept_bytes(kind.block, bytes, job.model.hidden, shape, layout.recompute, flash);
  share.block = wide * bytes.total();
  share.matrix = fc1_parameters(kind.block, job.model.hidden, layout);
  share.backward = wide * (2.0 / 3 * (bytes.mlp + bytes.experts) + 2 * shape.tokens * job.model.hidden);
  return share;
}

Shares shares_of(const Job& job, const cost::ActivationShape& shape) {
  const layout::Layout& layout = job.layout;
  const bool flash = job.software.attention == machine::Software::Attention::flash;
  Shares shares;
  shares.stages.resize(static_cast<size_t>(layout.pp));
  const std::vector<int64_t> split = layout::split_layers(static_cast<int64_t>(job.model.kind_of_layer.size()), layout.pp, layout.chunks);
  std::vector<KindShare> kinds;
  for (const ModelSummary::Kind& kind : job.model.kinds) kinds.push_back(kind_share(kind, job, shape, flash));
  size_t layer = 0;
  for (size_t part = 0; part < split.size(); ++part) {
    StageShare& stage = shares.stages[part % shares.stages.size()];
    for (int64_t i = 0; i < split[part]; ++i, ++layer) {
      const KindShare& kind = kinds[static_cast<size_t>(job.model.kind_of_layer[layer])];
      stage.dense += kind.dense;
      stage.expert += kind.expert;
      stage.kept += kind.kept;
      stage.largest_block = std::max(stage.largest_block, kind.block);
      stage.largest_unit = std::max(stage.largest_unit, kind.dense + kind.expert);
      stage.largest_matrix = std::max(stage.largest_matrix, kind.matrix);
      stage.backward = std::max(stage.backward, kind.backward);
    }
  }
  const double tp = static_cast<double>(layout.tp);
  shares.embedding = job.model.embedding_parameters / tp;
  shares.head = job.model.head_parameters / tp;
  shares.stages.front().dense += shares.embedding;
  if (!job.model.tied || layout.pp > 1) shares.stages.back().dense += shares.head;
  if (job.model.mtp_layers > 0) {
    const ModelSummary::Kind& kind = job.model.kinds.back();
    shares.stages.back().dense += job.model.mtp_layers * (kind.dense_parameters / tp + kind.replicated);
    shares.stages.back().expert += job.model.mtp_layers * kind.expert_parameters / static_cast<double>(layout.ep * layout.etp);
  }
  return shares;
}

/// Weights 16 bit and fp32 gradients (Megatron); FSDP keeps fp32 parameters and gathers 16-bit copies.
cost::StateBytes state_bytes(const Job& job) {
  cost::StateBytes state;
  using Gradients = machine::Software::Gradients;
  // mixed: 16-bit gradients beside their fp32 accumulator.
  state.gradient = job.software.gradients == Gradients::fp32 ? 4 : job.software.gradients == Gradients::half ? 2 : 2 + 4;
  // fp16 keeps fp16 gradients and unscaled fp32 copies of them beside the master weights and moments.
  if (job.precision == machine::Precision::fp16) state.gradient = 2, state.optimizer = 16;
  if (job.layout.zero == 3 || job.precision == machine::Precision::fp32) return {4, 4, 8};
  return state;
}

void fill_states(Memory& memory, const Job& job, const StageShare& stage) {
  const layout::Layout& layout = job.layout;
  const cost::StateBytes state = state_bytes(job);
  if (job.software.frozen_base) {
    memory.weights = 2 * (stage.dense + stage.expert) / (layout.zero == 3 ? static_cast<double>(layout.shard_ranks()) : 1);
    return;
  }
  const double dense = static_cast<double>(layout.shard_ranks()), expert = static_cast<double>(std::max<int64_t>(1, layout.expert_dp()));
  const auto share = [&](double bytes, int from) {
    return layout.zero >= from ? bytes * (stage.dense / dense + stage.expert / expert) : bytes * (stage.dense + stage.expert);
  };
  memory.weights = share(state.weight, 3);
  memory.gradients = share(state.gradient, 2);
  memory.optimizer = layout.offload ? 0 : share(state.optimizer, 1);
  // The host keeps the state, and the fp32 gradients of its share (ZeRO-Offload, arXiv 2101.06840, section 3).
  if (layout.offload) memory.host = share(state.optimizer + 4, 1);
}

/// Bytes per logit alive at once in the loss; see Software::Loss.
double loss_bytes(machine::Software::Loss loss) {
  constexpr double kBytes[] = {12, 16, 6, 4};
  return kBytes[static_cast<int>(loss)];
}

/// Peak of one stage: the larger of the loss (last stage) and the backward of the last block.
Memory stage_peak(const Job& job, const cost::Tuning& tuning, const cost::ActivationShape& shape, const Shares& shares, int64_t index) {
  const layout::Layout& layout = job.layout;
  const StageShare& stage = shares.stages[static_cast<size_t>(index)];
  Memory memory;
  memory.stage = index;
  fill_states(memory, job, stage);
  const double tp = shape.tp, outer = shape.sequence_parallel ? tp : 1;
  const double flight = cost::in_flight(layout.schedule, layout.pp, layout.chunks, std::max<int64_t>(1, layout.micro_batches()), index);
  memory.activations = flight * stage.kept;
  const bool first = index == 0, last = index == layout.pp - 1;
  const double element = element_bytes(job);
  if (first) memory.activations += flight * element * shape.tokens * job.model.hidden / outer;

  double backward = stage.backward;
  if (layout.recompute != layout::Recompute::none && layout.recompute != layout::Recompute::attention) backward += stage.largest_block;
  if (job.software.gradients == machine::Software::Gradients::fp32 && !job.software.frozen_base && layout.zero < 3) backward += 4 * stage.largest_matrix;
  if (layout.zero == 3) backward += (2 * 2 + 2 + 4) * stage.largest_unit;  // two units gathered, one whole gradient and its fp32 copy
  double loss = 0;
  if (last) {
    const double elements = shape.tokens * job.model.vocab / tp;
    const double head = element * shares.head;
    loss = loss_bytes(job.software.loss) * elements + 3 * element * shape.tokens * job.model.hidden;
    loss += head;  // the head's weight gradient; under FSDP the gathered head as well
    if (layout.zero == 3) loss += head;
    // Its weight gradient and the logits' gradient are still alive when the last block's backward starts.
    backward += head + element * elements;
    memory.logits = loss > backward ? loss : 0;
  }
  memory.transient = std::max(loss, backward) - memory.logits;
  memory.reserve = memory.allocated() * (job.software.static_allocation ? tuning.reserve_share : tuning.dynamic_reserve_share);
  memory.context = tuning.context_gib * kGiB;
  int communicators = 0;
  for (const int64_t degree : {layout.tp, layout.cp, layout.dp, layout.pp, layout.ep}) communicators += degree > 1;
  // NCCL keeps channel buffers per communicator: 0.5 to 0.7 GB were reported on A100.
  memory.context += 0.55e9 * communicators;
  return memory;
}

void judge(Memory& memory, const Job& job, const cost::Tuning& tuning) {
  memory.fit_probability = host_fits(memory, job) ? fit_probability(memory.needed(), job.machine.device.memory_gib * kGiB, tuning.fit_sigma) : 0;
}

}  // namespace

double fit_probability(double needed, double capacity, double sigma) { return 0.5 * std::erfc((needed - capacity) / (sigma * needed) / std::sqrt(2.0)); }

double host_bytes(const Memory& memory, const Job& job) { return memory.host * static_cast<double>(std::min(job.machine.node_devices, job.layout.devices())); }

bool host_fits(const Memory& memory, const Job& job) {
  constexpr double kForJobs = 0.9;  // of the host's memory: the rest is the system's, data loaders' and pinned buffers'
  return memory.host == 0 || host_bytes(memory, job) <= kForJobs * job.machine.host_memory_gib * kGiB;
}

std::vector<Memory> stage_memory(const Job& job, const cost::Tuning& tuning) {
  const cost::ActivationShape shape = shape_of(job, tuning);
  const Shares shares = shares_of(job, shape);
  std::vector<Memory> stages;
  stages.reserve(static_cast<size_t>(job.layout.pp));
  for (int64_t index = 0; index < job.layout.pp; ++index) {
    stages.push_back(stage_peak(job, tuning, shape, shares, index));
    judge(stages.back(), job, tuning);
  }
  return stages;
}

Memory peak_memory(const Job& job, const cost::Tuning& tuning) {
  const cost::ActivationShape shape = shape_of(job, tuning);
  const Shares shares = shares_of(job, shape);
  Memory fullest = stage_peak(job, tuning, shape, shares, 0);
  for (int64_t index = 1; index < job.layout.pp; ++index) {
    const Memory stage = stage_peak(job, tuning, shape, shares, index);
    if (stage.allocated() > fullest.allocated()) fullest = stage;
  }
  judge(fullest, job, tuning);
  return fullest;
}

Estimate estimate(const Job& job, const cost::Tuning& tuning) {
  Estimate out;
  out.memory = peak_memory(job, tuning);
  out.time = step_time(job, tuning);
  const double tokens = static_cast<double>(job.sequence * job.layout.global_batch), devices = static_cast<double>(job.layout.devices());
  out.tokens_per_second = tokens / out.time.step;
  out.tokens_per_second_per_device = out.tokens_per_second / devices;
  const double peak = 1e12 * machine::peak_tflops(job.machine.device, job.precision);
  out.mfu = out.tokens_per_second_per_device * job.model.training_flops_causal / peak;
  out.mfu_full = out.tokens_per_second_per_device * job.model.training_flops_full / peak;
  const double again = job.layout.recompute == layout::Recompute::full ? 4.0 / 3 : job.layout.recompute == layout::Recompute::half ? 7.0 / 6 : 1.0;
  out.hfu = out.mfu * again;
  return out;
}

}  // namespace weft::plan
