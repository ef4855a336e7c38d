// Memory by category and time by term of one layout, in closed form.
#pragma once

#include <string>
#include <vector>

#include "weft/cost/block.h"
#include "weft/plan/job.h"

namespace weft::plan {

/// Bytes on one rank of a stage at its peak.
struct Memory {
  double weights = 0;
  double gradients = 0;
  double optimizer = 0;
  double activations = 0;  ///< kept for the backward, micro-batches in flight included
  double logits = 0;       ///< logits, softmax and gradient in the loss
  double transient = 0;    ///< alive once: gathered parameters, gradients in flight, workspaces
  double reserve = 0;      ///< allocator cache above the live tensors
  double context = 0;      ///< device context and communicators
  double host = 0;         ///< in the host's memory: offloaded optimizer state and the gradients on their way, of one rank
  int64_t stage = 0;       ///< pipeline stage with this peak
  double fit_probability = 1;

  double allocated() const { return weights + gradients + optimizer + activations + logits + transient; }
  double reserved() const { return allocated() + reserve; }
  double device() const { return reserved() + context; }
  /// What must fit: before it fails, the allocator gives its cache back, all but the holes in use (about half).
  double needed() const { return allocated() + 0.5 * reserve + context; }
};

/// Seconds of one step by term. The terms add up to `step`.
struct Time {
  double gemm = 0;
  double attention = 0;
  double memory = 0;       ///< memory-bound kernels
  double host = 0;         ///< device waits for launches
  double recompute = 0;
  double tp = 0, cp = 0, ep = 0, pp = 0, dp = 0;  ///< exposed communication
  double bubble = 0;       ///< pipeline fill and drain, and waiting for the slowest stage
  double optimizer = 0;
  double fixed = 0;
  double step = 0;         ///< median
  double step_p95 = 0;
};

/// Action times of one pipeline stage and chunk share, for the event simulator: seconds for one micro-batch.
struct StageTimes {
  double forward = 0;   ///< F, exposed communication inside the stage included
  double input = 0;     ///< I, recompute included
  double weight = 0;    ///< W; B = I + W
  double send = 0;      ///< one activation (or gradient) to the next stage
  int64_t layers = 0;
};

struct Estimate {
  Memory memory;
  Time time;
  double tokens_per_second = 0;             ///< whole job
  double tokens_per_second_per_device = 0;
  double mfu = 0;       ///< causal model FLOPs over the dense peak of the precision
  double mfu_full = 0;  ///< the same with full attention
  double hfu = 0;       ///< recompute counted
};

/// Closed-form estimate. `layout` must be legal (layout::check), which callers check once; nothing is validated here.
Estimate estimate(const Job& job, const cost::Tuning& tuning);

/// Peak of every stage (allocated bytes), for "which stage is the fullest".
std::vector<Memory> stage_memory(const Job& job, const cost::Tuning& tuning);
/// The fullest stage.
/// Whether the ranks of a node find room for their `host` bytes; what the system itself takes is left out.
bool host_fits(const Memory& memory, const Job& job);
/// Bytes of all ranks of one node in the host's memory.
double host_bytes(const Memory& memory, const Job& job);
Memory peak_memory(const Job& job, const cost::Tuning& tuning);
Time step_time(const Job& job, const cost::Tuning& tuning);

/// p95 over median of step times; on large systems it lies between 1.00 and 1.07.
constexpr double kP95OverMedian = 1.03;
/// Every step waits for the slowest device: share of the step, which grows with the logarithm of their number.
double straggler_share(const layout::Layout& layout, const cost::Tuning& tuning);

/// Action times per pipeline part: index part = chunk * pp + stage, as in layout::split_layers.
std::vector<StageTimes> stage_times(const Job& job, const cost::Tuning& tuning);

/// Probability that `needed` bytes fit into `capacity`: normal with relative deviation `sigma`.
double fit_probability(double needed, double capacity, double sigma);

}  // namespace weft::plan
