// Sums of work, and what all blocks of a job share.
#include "weft/cost/block.h"

#include <algorithm>

namespace weft::cost {
namespace {

constexpr double kGraphGap = 1e-6;  // seconds between two kernels of a captured graph

}  // namespace

Work& Work::operator+=(const Work& other) {
  gemm += other.gemm;
  attention += other.attention;
  memory += other.memory;
  tp += other.tp;
  cp += other.cp;
  ep += other.ep;
  launches += other.launches;
  return *this;
}

Work operator*(double factor, Work work) {
  return {factor * work.gemm, factor * work.attention, factor * work.memory, factor * work.tp, factor * work.cp, factor * work.ep, factor * work.launches};
}

Context Context::of(const layout::Layout& layout, const machine::Machine& machine, const machine::Software& software, const Tuning& tuning, double sequence,
                    machine::Precision precision, bool layer_norm) {
  Context context;
  context.layout = &layout;
  context.software = &software;
  context.tuning = &tuning;
  context.rates = Rates::of(machine.device, precision, tuning);
  context.tp = group_of(machine, layout.tp, 1, tuning);
  context.cp = group_of(machine, layout.cp, layout.tp, tuning);
  context.ep = group_of(machine, layout.ep, layout.etp, tuning);
  context.slowdown = slowdown_of(kCollectiveChannels, machine);
  context.sequence = sequence;
  context.tokens = sequence * static_cast<double>(layout.micro_batch) / static_cast<double>(layout.cp);
  if (software.scaling == machine::Software::Scaling::block) context.rates.matmul_low *= tuning.block_scaled_share;
  if (software.graphs && !machine.device.calibrated) context.rates.gap = std::min(context.rates.gap, kGraphGap);
  context.low_precision = precision == machine::Precision::fp8 || precision == machine::Precision::fp4;
  context.layer_norm = layer_norm;
  context.generation = machine.device.generation;
  return context;
}

double Context::norm_tokens() const { return layout->sequence_parallel ? tokens / tp.ranks : tokens; }

}  // namespace weft::cost
