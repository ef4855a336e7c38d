// Few cells of a matrix that show every pair of values of every two axes.
#pragma once

#include <cstddef>
#include <vector>

namespace weft::testing {

/// All cells of a matrix with `sizes` values per axis, each as one index per axis; the last axis runs fastest.
inline std::vector<std::vector<size_t>> every_cell(const std::vector<size_t>& sizes) {
  std::vector<std::vector<size_t>> cells{{}};
  for (const size_t size : sizes) {
    std::vector<std::vector<size_t>> longer;
    for (const auto& cell : cells) {
      for (size_t value = 0; value < size; ++value) {
        longer.push_back(cell);
        longer.back().push_back(value);
      }
    }
    cells = std::move(longer);
  }
  return cells;
}

/// Cells such that every pair of values of two axes stands in one of them; greedy: each adds the most pairs that are missing,
/// the first in every_cell()'s order where several do. Depends on `sizes` alone.
inline std::vector<std::vector<size_t>> pairwise(const std::vector<size_t>& sizes) {
  const auto all = every_cell(sizes);
  const size_t axes = sizes.size();
  std::vector<std::vector<bool>> seen(axes * axes);
  for (size_t a = 0; a < axes; ++a) {
    for (size_t b = a + 1; b < axes; ++b) seen[a * axes + b].assign(sizes[a] * sizes[b], false);
  }
  const auto visit = [&](const std::vector<size_t>& cell, bool mark) {
    size_t fresh = 0;
    for (size_t a = 0; a < axes; ++a) {
      for (size_t b = a + 1; b < axes; ++b) {
        auto pair = seen[a * axes + b][cell[a] * sizes[b] + cell[b]];
        if (!pair) ++fresh;
        if (mark) pair = true;
      }
    }
    return fresh;
  };
  std::vector<std::vector<size_t>> chosen;
  for (;;) {
    size_t most = 0;
    const std::vector<size_t>* best = nullptr;
    for (const auto& cell : all) {
      if (const size_t fresh = visit(cell, false); fresh > most) {
        most = fresh;
        best = &cell;
      }
    }
    if (best == nullptr) return chosen;
    visit(*best, true);
    chosen.push_back(*best);
  }
}

}  // namespace weft::testing
