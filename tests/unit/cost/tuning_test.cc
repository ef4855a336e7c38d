// The table of tuned constants: few, each with an origin, each settable by name.
#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>

#include "weft/core/error.h"
#include "weft/cost/tuning.h"

namespace weft::cost {
namespace {

TEST(Tuning, AtMostTwentyFiveConstantsEachWithOrigin) {
  const auto& table = tuned_constants();
  RecordProperty("tuned_constants", static_cast<int>(table.size()));
  EXPECT_LE(table.size(), 25u);
  // Every member of the struct is in the table: nothing is tuned in the dark.
  EXPECT_EQ(sizeof(Tuning), table.size() * sizeof(double));
  std::set<std::string> names;
  for (const TunedConstant& constant : table) {
    EXPECT_TRUE(names.insert(constant.name).second) << constant.name;
    EXPECT_GT(std::strlen(constant.origin), 10u) << constant.name << " has no origin";
    EXPECT_GT(std::strlen(constant.meaning), 10u) << constant.name;
  }
}

TEST(Tuning, SetByNameAndRefuseUnknown) {
  Tuning tuning;
  set_constant(tuning, "gemm_share", 0.5);
  EXPECT_EQ(tuning.gemm_share, 0.5);
  try {
    set_constant(tuning, "gem_share", 0.5);
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("gemm_share"), std::string::npos);
  }
}

}  // namespace
}  // namespace weft::cost
