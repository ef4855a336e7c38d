// Reduction kernels: one pass over all sources, in rank order, for any dtype and operation of the local back end.
#pragma once

#include <cstddef>

#include "weft/comm/local/types.h"

namespace weft::local {

/// Whether reduce() takes the pair. Not: `other` types, averages of bool, no operation.
bool can_reduce(Dtype dtype, Reduce op);

/// out[i] = sources[0][i] op sources[1][i] op ... op sources[n-1][i], strictly in this order for every element, so that the
/// result does not depend on how a tensor is cut into calls. `avg` divides the sum by n. bf16 and fp16 accumulate in fp32 and
/// round once, to nearest even. min and max of floating-point numbers return NaN if any input is NaN. Integers wrap around.
/// `out` may be the same pointer as a source; other overlaps are not allowed. No alignment needed. n >= 1.
void reduce(void* out, const void* const* sources, int n, size_t count, Dtype dtype, Reduce op);

}  // namespace weft::local
