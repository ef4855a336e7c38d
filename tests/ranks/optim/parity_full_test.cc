// Every optimizer x zero x dtype x number of ranks.
#include "tests/ranks/optim/parity.h"

namespace weft {
namespace {

class OptimizerMatrix : public ::testing::TestWithParam<testing::OptimizerCell> {};

TEST_P(OptimizerMatrix, EqualsOneRank) { testing::expect_optimizer_parity(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Every, OptimizerMatrix, ::testing::ValuesIn(testing::every_cell(testing::optimizer_sizes())), testing::name_of);

}  // namespace
}  // namespace weft
