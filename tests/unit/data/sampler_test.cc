#include "weft/data/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <set>
#include <vector>

namespace weft::data {
namespace {

std::vector<int64_t> take(const Sampler& sampler, int64_t from, int64_t count) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < count; ++i) out.push_back(sampler.at(from + i));
  return out;
}

TEST(Permutation, IsABijectionForEverySize) {
  std::vector<uint64_t> sizes;
  for (uint64_t n = 1; n <= 130; ++n) sizes.push_back(n);
  for (uint64_t n : {251ul, 255ul, 256ul, 257ul, 1009ul, 1023ul, 1024ul, 1025ul, 65535ul, 65536ul, 65537ul, 99991ul})
    sizes.push_back(n);
  for (const uint64_t n : sizes) {
    for (uint64_t seed = 0; seed < 3; ++seed) {
      const Permutation order(n, seed, seed * 7);
      std::vector<char> seen(n, 0);
      for (uint64_t i = 0; i < n; ++i) {
        const uint64_t value = order(i);
        ASSERT_LT(value, n);
        ASSERT_FALSE(seen[value]) << "n " << n << " seed " << seed << " value " << value << " twice";
        seen[value] = 1;
      }
    }
  }
}

TEST(Permutation, LargeSizesStayInRangeAndDiffer) {
  for (uint64_t n : {(1ul << 32) + 1, (1ul << 40) - 1, 1ul << 50}) {
    const Permutation order(n, 1, 0);
    std::set<uint64_t> values;
    for (uint64_t i = 0; i < 2000; ++i) {
      values.insert(order(n - 1 - i));
      EXPECT_LT(*values.rbegin(), n);
    }
    EXPECT_EQ(values.size(), 2000u);
  }
}

// Chi-square of where the first of 16 elements lands, over seeds: 15 degrees of freedom, 0.001 quantile 37.7.
TEST(Permutation, PlacesAreUniformOverSeeds) {
  constexpr int kSeeds = 16000;
  for (uint64_t epoch : {0ul, 1ul}) {
    std::vector<double> hits(16, 0.0);
    for (uint64_t seed = 0; seed < kSeeds; ++seed) ++hits[Permutation(16, seed, epoch)(0)];
    double chi = 0;
    for (double h : hits) chi += (h - kSeeds / 16.0) * (h - kSeeds / 16.0) / (kSeeds / 16.0);
    EXPECT_LT(chi, 37.7);
  }
}

// Neighbours in the file must not stay neighbours: for a random order the mean jump is n / 3.
TEST(Permutation, NeighboursAreSpread) {
  constexpr int64_t n = 10000;
  const Permutation order(n, 1, 0);
  double jump = 0;
  for (int64_t i = 1; i < n; ++i) jump += std::abs(static_cast<double>(order(i)) - static_cast<double>(order(i - 1)));
  EXPECT_NEAR(jump / (n - 1), n / 3.0, n / 3.0 * 0.03);
}

TEST(Sampler, EpochsDifferAndRepeatExactly) {
  const Sampler first(100, 7), again(100, 7), other(100, 8);
  const auto epoch0 = take(first, 0, 100), epoch1 = take(first, 100, 100);
  EXPECT_NE(epoch0, epoch1);
  EXPECT_NE(epoch0, take(other, 0, 100));
  EXPECT_EQ(epoch1, take(again, 100, 100));  // asked first, without the epoch before it
  auto sorted = epoch1;
  std::sort(sorted.begin(), sorted.end());
  for (int64_t i = 0; i < 100; ++i) EXPECT_EQ(sorted[i], i);
}

TEST(Sampler, UnshuffledIsFileOrder) {
  EXPECT_EQ(take(Sampler(3, 1, false), 1, 5), (std::vector<int64_t>{1, 2, 0, 1, 2}));
}

// Stopped at 30, resumed, stopped 10 later, resumed: the next is 40. Also exactly at the end of an epoch.
TEST(Sampler, StateIsOneIntegerThroughTwoResumes) {
  const auto whole = take(Sampler(50, 3), 0, 120);
  int64_t consumed = 0;
  std::vector<int64_t> seen;
  for (const int64_t part : {30, 10, 10, 50, 20}) {
    const auto piece = take(Sampler(50, 3), consumed, part);  // a new process: nothing but the integer survives
    seen.insert(seen.end(), piece.begin(), piece.end());
    consumed += part;
  }
  EXPECT_EQ(seen, whole);
}

// 12 samples; two steps on 3 ranks, then one step a rank and sample on 2: the union is every sample once.
TEST(Sampler, ElasticResumeLosesAndRepeatsNothing) {
  const Sampler sampler(12, 5);
  std::multiset<int64_t> seen;
  int64_t consumed = 0;
  auto step = [&](int64_t ranks) {
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const Share share = share_of(ranks, ranks, rank);
      for (int64_t i = 0; i < share.count; ++i) seen.insert(sampler.at(consumed + share.begin + i));
    }
    consumed += ranks;
  };
  for (int i = 0; i < 2; ++i) step(3);
  for (int i = 0; i < 3; ++i) step(2);
  EXPECT_EQ(consumed, 12);
  for (int64_t s = 0; s < 12; ++s) EXPECT_EQ(seen.count(s), 1u) << s;
}

TEST(Share, PartsCoverEverythingOnce) {
  for (int64_t total : {0, 1, 5, 12, 13}) {
    for (int64_t parts : {1, 2, 3, 4, 7}) {
      int64_t at = 0;
      for (int64_t i = 0; i < parts; ++i) {
        const Share share = share_of(total, parts, i);
        EXPECT_EQ(share.begin, at);
        EXPECT_LE(share.count - total / parts, 1);
        at += share.count;
      }
      EXPECT_EQ(at, total);
    }
  }
}

}  // namespace
}  // namespace weft::data
