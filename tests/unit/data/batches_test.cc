#include "weft/data/batches.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "tests/support/temp_dir.h"
#include "weft/core/error.h"

namespace weft::data {
namespace {

using ::weft::testing::TempDir;

TokenFile counting_file(const TempDir& dir, uint32_t count) {
  TokenWriter writer(dir / "t.bin", 1000, "test");
  std::vector<uint32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), 0u);
  writer.append(tokens);
  writer.finish();
  return TokenFile::open(dir / "t.bin");
}

std::vector<int64_t> values(const at::Tensor& t) {
  return {t.data_ptr<int64_t>(), t.data_ptr<int64_t>() + t.numel()};
}

TEST(Batches, TargetsAreTheNextTokens) {
  const TempDir dir;
  const TokenSamples samples(counting_file(dir, 100), 4);
  EXPECT_EQ(samples.size(), 24);
  const Batch batch = samples.batch({0, 23, 1});
  EXPECT_EQ(batch.inputs.sizes(), (at::IntArrayRef{3, 4}));
  EXPECT_EQ(values(batch.inputs), (std::vector<int64_t>{0, 1, 2, 3, 92, 93, 94, 95, 4, 5, 6, 7}));
  EXPECT_EQ(values(batch.targets), (std::vector<int64_t>{1, 2, 3, 4, 93, 94, 95, 96, 5, 6, 7, 8}));
  EXPECT_EQ(batch.tokens, 12);
}

TEST(Batches, TooFewTokensIsAnErrorWithTheNumbers) {
  const TempDir dir;
  const TokenFile file = counting_file(dir, 10);
  try {
    TokenSamples(file, 16);
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("holds 10 tokens; one sample of data.seq = 16 needs 17"));
  }
}

/// First input token of every sample of one global batch, over all coordinates, in order of place.
std::vector<int64_t> places(const TokenSamples& samples, int64_t consumed, int64_t global, int64_t micro, int64_t dp) {
  std::vector<int64_t> out;
  for (int64_t rank = 0; rank < dp; ++rank) {
    const TrainBatches batches(samples, Sampler(samples.size(), 3), global, micro, rank, dp);
    for (int64_t m = 0; m < batches.accumulation(); ++m) {
      for (const at::Tensor& row : batches.at(consumed, m).inputs.unbind(0)) out.push_back(row[0].item<int64_t>());
    }
  }
  return out;
}

TEST(Batches, GlobalBatchDoesNotDependOnRanksOrMicroBatch) {
  const TempDir dir;
  const TokenSamples samples(counting_file(dir, 1000), 4);
  for (const int64_t consumed : {0, 12, 240}) {  // 249 samples: the last batch straddles two epochs
    const auto one = places(samples, consumed, 12, 12, 1);
    ASSERT_EQ(one.size(), 12u);
    for (const int64_t dp : {1, 2, 3, 4, 5}) {
      for (const int64_t micro : {1, 2, 4, 5})
        EXPECT_EQ(places(samples, consumed, 12, micro, dp), one) << dp << " " << micro;
    }
  }
}

}  // namespace
}  // namespace weft::data
