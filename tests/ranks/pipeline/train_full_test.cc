// Every model of the tensor tests under every schedule, and with the other axes.
#include "tests/ranks/tensor/verify_models.h"
#include "tests/support/ranks.h"

namespace weft {
namespace {

class PipelineMatrix : public ::testing::TestWithParam<int> {};

TEST_P(PipelineMatrix, EqualsOneRank) {
  std::vector<std::string> layouts;
  for (const char* schedule : {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"}) {
    const std::string s = std::string(",schedule=") + schedule;
    layouts.push_back("pp=2,micro_batch=3" + s);
    layouts.push_back("pp=2,dp=2,micro_batch=1,zero=1" + s);
    layouts.push_back("pp=2,dp_shard=2,zero=3,micro_batch=2,train.recompute=full" + s);
    layouts.push_back("pp=2,dp_shard=2,zero=2,tp=2,micro_batch=1,sequence_parallel=true" + s);
    layouts.push_back("pp=2,dp=2,tp=2,micro_batch=4" + s);
  }
  for (const char* s : {"gpipe", "1f1b", "zb-h1"}) {
    layouts.push_back(std::string("pp=3,micro_batch=1,schedule=") + s);
    layouts.push_back(std::string("pp=4,micro_batch=3,schedule=") + s);
  }
  layouts.emplace_back("pp=2,dp=4,dp_shard=2,zero=3,micro_batch=1,schedule=zb-h1");
  testing::expect_verified(testing::kVerifyModels[static_cast<size_t>(GetParam())], layouts);
}

INSTANTIATE_TEST_SUITE_P(Models, PipelineMatrix, ::testing::Range(0, static_cast<int>(testing::kVerifyModels.size())));

}  // namespace
}  // namespace weft
