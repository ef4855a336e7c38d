#include "weft/comm/crossing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace weft::detail {
namespace {

using ::testing::HasSubstr;

TEST(Crossing, GroupsOnOneNodeSayNothing) {
  EXPECT_FALSE(crossing_text("dp=2 x tp=2", "tp", {{0, 1}, {2, 3}}, {"a", "a", "b", "b"}));
}

// 2 nodes of 4 ranks that were started round robin: every tp group has ranks of both.
TEST(Crossing, RanksDealtRoundRobinAreNamedWithTheirHosts) {
  const auto text = crossing_text("dp=2 x tp=4", "tp", {{0, 1, 2, 3}, {4, 5, 6, 7}}, {"a", "b", "a", "b", "a", "b", "a", "b"});
  ASSERT_TRUE(text);
  EXPECT_THAT(*text, HasSubstr("mesh dp=2 x tp=4: 2 of 2 groups along tp cross nodes"));
  EXPECT_THAT(*text, HasSubstr("ranks 0, 1, 2, 3 on a, b;"));
}

TEST(Crossing, OnlyTheGroupsThatCrossCount) {
  const auto text = crossing_text("dp=3 x tp=2", "tp", {{0, 1}, {2, 3}, {4, 5}}, {"a", "a", "a", "b", "b", "b"});
  ASSERT_TRUE(text);
  EXPECT_THAT(*text, HasSubstr("1 of 3 groups along tp cross nodes, for instance ranks 2, 3 on a, b;"));
}

}  // namespace
}  // namespace weft::detail
