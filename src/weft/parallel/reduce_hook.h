// How the gradients of one bucket travel: a seam for compression.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "weft/comm/comm.h"

namespace weft {

/// One bucket that is ready to be reduced.
struct BucketReduction {
  int64_t bucket = 0;    ///< its index; buckets come in the same order on all ranks, each once per step
  at::Tensor gradients;  ///< [n] this rank's gradients, the same memory in every step; unused parameters are zero
  const Comm& comm;
  ReduceOp op;           ///< sum or avg
};

/// Starts the reduction of a bucket, on backward's thread, and returns what completes it: after that call `gradients` holds
/// the reduced values, equal on all ranks, and no rank reads it any more. All buckets of a step are started before the
/// first is completed. Collectives must come in the same order on all ranks, so a hook must not decide by local values.
using ReduceHook = std::function<std::function<void()>(const BucketReduction&)>;

/// Whether gradients can be sent in `dtype`; else the user is told what they travel as.
bool can_travel_as(at::ScalarType dtype);
inline constexpr char kWireDtypes[] = "gradients travel as kBFloat16, kHalf, kFloat or kDouble";

/// The hook behind DataParallelOptions::reduce_dtype; one for each DataParallel. Gradients are rounded to `wire` (a
/// floating-point dtype), the sums form in fp32 (fp64 if wire is) and are rounded to `wire` once: a reduce-scatter and an
/// all-gather in `wire`. With u = 2^-8 for bf16 (2^-11 for fp16, whose largest value is 65504), an element of the mean
/// over ranks is off by at most u (mean of the ranks' |g|) + u |result|, to first order.
ReduceHook reduce_as(at::ScalarType wire);

}  // namespace weft
