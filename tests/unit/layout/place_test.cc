#include "weft/layout/place.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace weft::layout {
namespace {

using ::testing::ElementsAre;

TEST(Place, AlignsEveryTensorAndCutsIntoEqualShards) {
  const FlatPlan plan = place({5, 0, 33, 1}, 3);
  EXPECT_THAT(plan.offsets, ElementsAre(0, 32, 32, 96));
  EXPECT_EQ(plan.numel, 192);  // 128 rounded up to a multiple of 3 * 32
  EXPECT_EQ(place({}, 4).numel, 0);
}

TEST(Place, CutsNoGranuleApart) {
  for (const int64_t granule : {int64_t{1}, int64_t{7}, int64_t{256}}) {
    const std::vector<int64_t> numels{5000, 31, 0, 9999};
    for (int64_t parts = 1; parts <= 5; ++parts) {
      const FlatPlan plan = place(numels, parts, granule);
      ASSERT_EQ(plan.numel % (parts * kFlatAlignment), 0);
      for (size_t i = 0; i < numels.size(); ++i) {
        EXPECT_EQ(plan.offsets[i] % kFlatAlignment, 0);
        for (int64_t part = 1; part < parts; ++part) {
          const int64_t cut = part * (plan.numel / parts) - plan.offsets[i];
          EXPECT_TRUE(cut <= 0 || cut >= numels[i] || cut % granule == 0) << granule << ' ' << parts << ' ' << i;
        }
      }
    }
  }
}

TEST(Buckets, LastParametersComeFirstAndTheFirstOnesFormASmallBucket) {
  const std::vector<BucketItem> items{{60, "f"}, {30, "f"}, {50, "f"}, {40, "f"}, {90, "f"}};
  EXPECT_THAT(make_buckets(items, {.bytes = 100, .last_bytes = 70}),
              ElementsAre(ElementsAre(4), ElementsAre(3, 2), ElementsAre(1), ElementsAre(0)));
}

TEST(Buckets, KeysNeverMixAndEveryItemAppearsOnce) {
  std::vector<BucketItem> items;
  for (int i = 0; i < 97; ++i) items.push_back({(i * 37) % 50, i % 3 == 0 ? "a" : "b"});
  std::vector<int> seen(items.size(), 0);
  for (const auto& bucket : make_buckets(items, {.bytes = 120, .last_bytes = 40})) {
    ASSERT_FALSE(bucket.empty());
    int64_t bytes = 0;
    for (const int64_t i : bucket) {
      ++seen[i];
      bytes += items[i].bytes;
      EXPECT_EQ(items[i].key, items[bucket[0]].key);
    }
    EXPECT_TRUE(bytes <= 120 || bucket.size() == 1);
  }
  EXPECT_THAT(seen, ::testing::Each(1));
}

TEST(Buckets, AnItemLargerThanTheLimitStandsAlone) {
  EXPECT_THAT(make_buckets({{500, "f"}, {10, "f"}}, {.bytes = 100, .last_bytes = 10}),
              ElementsAre(ElementsAre(1), ElementsAre(0)));
  EXPECT_TRUE(make_buckets({}).empty());
}

TEST(GradientBuffers, SmallGroupsGetSmallOnesWhereThatHoldsLess) {
  const auto sizes = [](const std::vector<int64_t>& groups, const std::vector<int64_t>& others = {}) {
    std::vector<int64_t> list;
    for (const BufferClass& c : gradient_buffers(groups, others)) list.insert(list.end(), static_cast<size_t>(c.count), c.bytes);
    return list;
  };
  EXPECT_THAT(sizes({}), ElementsAre());
  EXPECT_THAT(sizes({0, 8}), ElementsAre(8));
  EXPECT_THAT(sizes({8, 8, 8, 8, 8}), ElementsAre(8, 8, 8));
  EXPECT_THAT(sizes({28, 147, 28, 28, 28}), ElementsAre(147, 28, 28, 28)) << "a tied embedding beside blocks";
  EXPECT_THAT(sizes({90, 20, 20, 20, 20, 80}), ElementsAre(90, 20, 20, 20)) << "embedding, blocks, head";
  EXPECT_THAT(sizes({80, 90, 20, 20, 20, 20}), ElementsAre(90, 90, 20, 20, 20)) << "neighbours do not share";
  EXPECT_THAT(sizes({90, 20, 90, 20, 90}), ElementsAre(90, 90, 20, 20)) << "small ones lie between";
  EXPECT_THAT(sizes({90, 20, 20, 20, 20}, {80}), ElementsAre(90, 90, 20, 20, 20)) << "what may come at any time comes beside it";
  EXPECT_THAT(sizes({}, {9, 9, 9, 9}), ElementsAre(9, 9, 9));
  EXPECT_THAT(sizes({9, 8, 7, 6}), ElementsAre(9, 9, 9)) << "as large as each other: classes would hold more";
  EXPECT_THAT(sizes({40, 20, 10}), ElementsAre(40, 20, 20)) << "no more buffers than groups";
}

}  // namespace
}  // namespace weft::layout
