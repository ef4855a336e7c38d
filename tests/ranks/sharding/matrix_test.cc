// Cells of the parity matrix that show every pair of its values.
#include "tests/ranks/sharding/matrix.h"

namespace weft {
namespace {

class ParityMatrix : public ::testing::TestWithParam<testing::MatrixCell> {};

TEST_P(ParityMatrix, EqualsOneRank) { testing::expect_parity(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Pairwise, ParityMatrix, ::testing::ValuesIn(testing::pairwise(testing::matrix_sizes())), testing::name_of_cell);

TEST(ParityMatrixCells, CoverEveryPair) {
  const auto sizes = testing::matrix_sizes();
  const auto cells = testing::pairwise(sizes);
  EXPECT_LT(cells.size(), testing::every_cell(sizes).size() / 4);
  for (size_t a = 0; a < sizes.size(); ++a) {
    for (size_t b = a + 1; b < sizes.size(); ++b) {
      std::set<std::pair<size_t, size_t>> pairs;
      for (const auto& cell : cells) pairs.emplace(cell[a], cell[b]);
      EXPECT_EQ(pairs.size(), sizes[a] * sizes[b]) << "axes " << a << " and " << b;
    }
  }
}

}  // namespace
}  // namespace weft
