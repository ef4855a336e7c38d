// How the ranks of a tensor-parallel group share out columns, rows and heads.
#pragma once

#include <cstdint>
#include <vector>

#include "weft/core/error.h"
#include "weft/model/spec.h"

namespace weft::layout {

/// begin .. begin + size - 1 of some row of things.
struct Part {
  int64_t begin = 0;
  int64_t size = 0;
};

/// Rank `rank`'s part of `count` things: in rank order, sizes differ by at most one. Nothing is padded.
inline Part part_of(int64_t count, int64_t ranks, int64_t rank) {
  const int64_t begin = count * rank / ranks;
  return {begin, count * (rank + 1) / ranks - begin};
}

/// One rank's attention heads.
struct HeadPart {
  Part queries;
  Part keys;           ///< of keys and values
  int64_t copies = 1;  ///< neighbouring ranks that hold these same key heads
};

/// Each rank gets whole query heads and the key heads that these read. With fewer key heads than ranks each is held by ranks /
/// kv_heads neighbours, which share its query heads out. check_tp_ranks() says which numbers of ranks can do this.
HeadPart head_part(const model::AttentionSpec& attention, int64_t ranks, int64_t rank);

/// Heads of the rank that has the most: it decides on time and memory.
struct HeadCounts {
  double queries = 0, keys = 0;
};
HeadCounts most_heads(const model::AttentionSpec& attention, int64_t ranks);

/// Whether `ranks` ranks can share out `attention`.
bool heads_fit(const model::AttentionSpec& attention, int64_t ranks);

/// Adds, as findings about `where`, why `ranks` ranks cannot share `spec`'s layers out, with the numbers that can.
void check_tp_ranks(const model::ModelSpec& spec, int64_t ranks, const std::string& where, Findings& findings);

/// Rank `rank`'s part of a parameter: `part` of dim `dim` (-1: all of it), as `copies` neighbouring ranks hold it.
struct ParamPart {
  int dim = -1;
  Part part;
  int64_t copies = 1;
};
ParamPart param_part(const model::Param& param, const model::ModelSpec& spec, int64_t ranks, int64_t rank);

}  // namespace weft::layout
