// Every cell of the parity matrix.
#include "tests/ranks/sharding/matrix.h"

namespace weft {
namespace {

class ParityMatrix : public ::testing::TestWithParam<testing::MatrixCell> {};

TEST_P(ParityMatrix, EqualsOneRank) { testing::expect_parity(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Every, ParityMatrix, ::testing::ValuesIn(testing::every_cell(testing::matrix_sizes())), testing::name_of_cell);

}  // namespace
}  // namespace weft
