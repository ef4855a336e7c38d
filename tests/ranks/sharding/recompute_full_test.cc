// Every mode of recompute at every position of the dial.
#include "tests/ranks/sharding/recompute.h"

namespace weft {
namespace {

class RecomputeMatrix : public ::testing::TestWithParam<size_t> {};

TEST_P(RecomputeMatrix, EqualsOneRankWithout) {
  std::vector<testing::RecomputeCell> cells;
  for (const auto& cell : testing::every_cell(testing::recompute_sizes())) {
    if (cell[0] == GetParam()) cells.push_back(cell);
  }
  testing::expect_recompute_parity(cells);
}

INSTANTIATE_TEST_SUITE_P(Every, RecomputeMatrix, ::testing::Range<size_t>(0, testing::kModes.size()),
                         [](const auto& info) { return testing::kModes[info.param].name; });

}  // namespace
}  // namespace weft
