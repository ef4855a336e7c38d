#include "weft/layout/stages.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "weft/core/error.h"

namespace weft::layout {

std::vector<int64_t> cut_by_cost(const std::vector<double>& costs, int64_t stages) {
  const auto parts = static_cast<int64_t>(costs.size());
  if (stages < 1 || stages > parts) {
    throw ConfigError(fmt::format("{} stages of a model with {} parts (layers, embedding and head): each stage has at least one; legal: 1 to {}", stages, parts, parts));
  }
  std::vector<double> upto{0};
  for (const double cost : costs) upto.push_back(upto.back() + cost);
  // best[s][i]: parts 0 .. i-1 in s stretches, as (largest, sum of squares); from[s][i]: where the last one begins.
  using Value = std::pair<double, double>;
  const Value never{std::numeric_limits<double>::infinity(), 0};
  const auto n = static_cast<size_t>(parts);
  std::vector<std::vector<Value>> best(static_cast<size_t>(stages) + 1, std::vector<Value>(n + 1, never));
  std::vector<std::vector<size_t>> from(best.size(), std::vector<size_t>(n + 1, 0));
  best[0][0] = {0, 0};
  for (size_t s = 1; s < best.size(); ++s) {
    for (size_t i = s; i <= n; ++i) {
      for (size_t k = s - 1; k < i; ++k) {
        const double last = upto[i] - upto[k];
        const Value value{std::max(best[s - 1][k].first, last), best[s - 1][k].second + last * last};
        if (value < best[s][i]) best[s][i] = value, from[s][i] = k;
      }
    }
  }
  std::vector<int64_t> begins(best.size(), parts);
  size_t end = n;
  for (size_t s = best.size() - 1; s > 0; --s) begins[s - 1] = static_cast<int64_t>(end = from[s][end]);
  return begins;
}

}  // namespace weft::layout
