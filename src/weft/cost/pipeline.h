// Pipeline and context-parallel arithmetic in closed form.
#pragma once

#include <cstdint>
#include <vector>

namespace weft::cost {

/// Idle share of the step under GPipe and 1F1B, and interleaved with v chunks: ((p-1)/v) / (m + (p-1)/v).
double bubble_fraction(double stages, double micro_batches, double chunks = 1);

/// Least number of micro-batches for which the idle share of 1F1B is at most `fraction`.
int64_t micro_batches_for_bubble(int64_t stages, double fraction);

/// Sum(t) + (m-1) max(t), t = forward + backward of each stage: exact for GPipe, and for 1F1B when the slowest stage is last.
double uneven_pipeline_time(const std::vector<double>& stages, double micro_batches);

/// Query-key pairs that rank `rank` of `ranks` computes for one causal sequence; zig-zag gives rank r chunks r and 2c-1-r.
int64_t causal_pairs(int64_t sequence, int64_t ranks, int64_t rank, bool zigzag);

}  // namespace weft::cost
