// Widths of attention on one rank, which times, FLOPs and memory share.
#pragma once

#include "weft/model/spec.h"

namespace weft::cost {

/// Widths of one block on one tensor-parallel rank.
struct Widths {
  double q = 0, kv = 0, value = 0, heads = 0, head_dim = 0;
};

Widths widths_of(const model::AttentionSpec& attention, double tp);

/// Tokens that one query looks at on average.
double reach(const model::AttentionSpec& attention, double sequence, bool causal);

}  // namespace weft::cost
