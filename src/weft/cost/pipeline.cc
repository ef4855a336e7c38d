#include "weft/cost/pipeline.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace weft::cost {
namespace {

/// Pairs of the queries [first, last): query i sees i + 1 keys.
int64_t pairs_between(int64_t first, int64_t last) { return (last * (last + 1) - first * (first + 1)) / 2; }

}  // namespace

double bubble_fraction(double stages, double micro_batches, double chunks) {
  const double idle = (stages - 1) / chunks;
  return idle / (micro_batches + idle);
}

int64_t micro_batches_for_bubble(int64_t stages, double fraction) {
  // (p-1) / (m+p-1) <= f  <=>  m >= (p-1)(1-f)/f; the small number absorbs the rounding of 1/f.
  return static_cast<int64_t>(std::ceil(static_cast<double>(stages - 1) * (1 - fraction) / fraction - 1e-9));
}

double uneven_pipeline_time(const std::vector<double>& stages, double micro_batches) {
  return std::accumulate(stages.begin(), stages.end(), 0.0) + (micro_batches - 1) * *std::max_element(stages.begin(), stages.end());
}

int64_t causal_pairs(int64_t sequence, int64_t ranks, int64_t rank, bool zigzag) {
  if (!zigzag) return pairs_between(sequence / ranks * rank, sequence / ranks * (rank + 1));
  const int64_t chunk = sequence / (2 * ranks), mirror = 2 * ranks - 1 - rank;
  return pairs_between(chunk * rank, chunk * (rank + 1)) + pairs_between(chunk * mirror, chunk * (mirror + 1));
}

}  // namespace weft::cost
