// Every model under every layout.
#include "tests/ranks/tensor/verify_models.h"

namespace weft {
namespace {

class TensorMatrix : public ::testing::TestWithParam<testing::VerifyModel> {};

TEST_P(TensorMatrix, EqualsOneRank) { testing::expect_verified(GetParam(), testing::verify_layouts(GetParam())); }
TEST_P(TensorMatrix, LossesInFp32AreOneRanks) { testing::expect_verified(GetParam(), testing::verify_layouts(GetParam()), "fp32"); }

INSTANTIATE_TEST_SUITE_P(Models, TensorMatrix, ::testing::ValuesIn(testing::kVerifyModels), [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace weft
