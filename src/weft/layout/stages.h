// Which stretch of a model each pipeline stage gets.
#pragma once

#include <cstdint>
#include <vector>

namespace weft::layout {

/// Cuts a list of parts (layers, and what stands before and behind them) into `stages` stretches without a gap, each of one part at
/// least, so that the dearest stretch is as cheap as can be; of equal ones the most even. Returns where each begins, and the end: stage s has
/// parts [result[s], result[s + 1]). ConfigError when there are fewer parts than stages.
std::vector<int64_t> cut_by_cost(const std::vector<double>& costs, int64_t stages);

}  // namespace weft::layout
