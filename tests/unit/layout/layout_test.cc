#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "weft/layout/layout.h"
#include "weft/layout/part.h"
#include "weft/model/presets.h"

namespace weft::layout {
namespace {

TEST(SplitLayers, EveryLayerOnceAndEndsAreLightest) {
  for (int64_t layers : {1, 5, 22, 46, 61, 78, 94, 126})
    for (int64_t pp : {1, 2, 3, 4, 8, 12, 16})
      for (int64_t chunks : {1, 2, 3, 8}) {
        if (pp * chunks > layers) continue;
        const std::vector<int64_t> split = split_layers(layers, pp, chunks);
        EXPECT_EQ(std::accumulate(split.begin(), split.end(), int64_t{0}), layers);
        const auto [low, high] = std::minmax_element(split.begin(), split.end());
        EXPECT_LE(*high - *low, 1);
        EXPECT_EQ(split.back(), *low);
      }
}

// Llama-3.1-405B: 126 layers on 8 x 8 parts, first and last one layer less (Llama 3 report, section 3.3.2).
TEST(SplitLayers, Llama405B) {
  const std::vector<int64_t> split = split_layers(126, 8, 8);
  EXPECT_EQ(split.front(), 1);
  EXPECT_EQ(split.back(), 1);
  for (size_t i = 1; i + 1 < split.size(); ++i) EXPECT_EQ(split[i], 2);
}

// DeepSeek-V3: 61 layers; a prediction module and two heads make the last rank three layers longer.
TEST(SplitLayers, LevelsOutWhatTheLastPartComputesBesides) {
  const std::vector<int64_t> split = split_layers(61, 4, 4, 3.0);
  std::vector<int64_t> ranks(4, 0);
  for (size_t part = 0; part < split.size(); ++part) ranks[part % 4] += split[part];
  EXPECT_EQ(ranks, (std::vector<int64_t>{16, 16, 16, 13}));
  EXPECT_EQ(split_layers(64, 4, 4, 3.0), split_layers(64, 4, 4));  // even splits stay even
  for (int64_t layers : {5, 22, 61, 126})
    for (int64_t pp : {2, 3, 5}) {
      int64_t sum = 0;
      for (int64_t count : split_layers(layers, pp, 1, 1.4)) {
        EXPECT_GE(count, 1);
        sum += count;
      }
      EXPECT_EQ(sum, layers);
    }
}

std::string problems(Layout layout, const char* preset) { return check(layout, model::preset(preset)).text(); }

TEST(Part, MostHeadsIsWhatSomeRankHas) {
  for (const int64_t keys : {1, 2, 3, 8}) {
    for (const int64_t group : {1, 2, 3, 4}) {
      const model::AttentionSpec attention{.heads = keys * group, .kv_heads = keys};
      for (int64_t ranks = 1; ranks <= attention.heads; ++ranks) {
        if (!heads_fit(attention, ranks)) continue;
        int64_t queries = 0, most_keys = 0, all = 0;
        for (int64_t rank = 0; rank < ranks; ++rank) {
          const HeadPart part = head_part(attention, ranks, rank);
          queries = std::max(queries, part.queries.size), most_keys = std::max(most_keys, part.keys.size), all += part.queries.size;
        }
        const HeadCounts most = most_heads(attention, ranks);
        EXPECT_EQ(most.queries, static_cast<double>(queries)) << keys << " x " << group << " on " << ranks;
        EXPECT_EQ(most.keys, static_cast<double>(most_keys)) << keys << " x " << group << " on " << ranks;
        EXPECT_EQ(all, attention.heads);
      }
    }
  }
}

TEST(Check, EveryFindingAtOnceWithNearestLegalValues) {
  Layout layout;
  layout.tp = 12;
  layout.dp = 2;
  layout.global_batch = 7;
  const std::string text = problems(layout, "llama3-8b");
  EXPECT_NE(text.find("12 ranks cannot share out 32 query heads over 8 key heads"), std::string::npos) << text;
  EXPECT_NE(text.find("8, 16, 24, 32"), std::string::npos) << text;
  EXPECT_NE(text.find("use 6 or 8"), std::string::npos) << text;
}

TEST(Check, RefusesImpossibleDegrees) {
  Layout layout;
  layout.pp = 0;
  EXPECT_NE(problems(layout, "llama3-8b").find("pp"), std::string::npos);
  layout = {};
  layout.ep = 4;
  EXPECT_NE(problems(layout, "llama3-8b").find("no experts"), std::string::npos);
  layout = {};
  layout.chunks = 2;
  EXPECT_NE(problems(layout, "llama3-8b").find("more than one stage"), std::string::npos);
  layout = {};
  layout.pp = 16, layout.chunks = 4;
  EXPECT_NE(problems(layout, "llama3-8b").find("64 parts for 32 layers"), std::string::npos);
  layout = {};
  layout.zero = 4;
  EXPECT_NE(problems(layout, "llama3-8b").find("zero"), std::string::npos);
}

TEST(Check, AcceptsUnevenLayers) {
  Layout layout;
  layout.pp = 8, layout.chunks = 8, layout.tp = 8, layout.cp = 2, layout.dp = 4, layout.global_batch = 1152;
  EXPECT_TRUE(check(layout, model::preset("llama3.1-405b")).empty());
  EXPECT_EQ(layout.devices(), 512);
  EXPECT_EQ(layout.micro_batches(), 288);
}

TEST(Divisors, NearestOnes) {
  EXPECT_EQ(divisors(12), (std::vector<int64_t>{1, 2, 3, 4, 6, 12}));
  EXPECT_EQ(nearest_divisors(12, 5), "4 or 6");
  EXPECT_EQ(nearest_divisors(12, 6), "6");
}

}  // namespace
}  // namespace weft::layout
