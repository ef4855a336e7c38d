// Ranks of one machine that their launcher's variables place on several nodes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/support/ranks.h"
#include "weft/comm/mesh.h"
#include "weft/core/log.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using testing::RankBody;

// Six ranks on two nodes. "by node": 0 1 2 | 3 4 5, as launchers place them; "round robin": 0 2 4 | 1 3 5.
const RankBody kMesh("mesh over nodes", [](World& outer, const std::string& placement) -> std::string {
  const int r = outer.rank(), node = placement == "by node" ? r / 3 : r % 2;
  ::setenv("LOCAL_WORLD_SIZE", "3", 1);
  ::setenv("LOCAL_RANK", std::to_string(placement == "by node" ? r % 3 : r / 2).c_str(), 1);
  ::setenv("GROUP_RANK", std::to_string(node).c_str(), 1);
  ::setenv("GROUP_WORLD_SIZE", "2", 1);
  std::string said;
  set_log([&](LogLevel level, std::string_view text) { said += (level == LogLevel::warning ? "warning: " : "") + std::string(text); });
  const World world = World::init({.timeout = testing::kTestTimeout});
  const Mesh mesh(world, {{"dp", 2}, {"tp", 3}});
  at::Tensor t = at::full({1}, r + 1.0);
  mesh["tp"].all_reduce(t).wait();
  EXPECT_EQ(t.item<double>(), r < 3 ? 1 + 2 + 3 : 4 + 5 + 6);
  set_log({});
  return said;
});

TEST(Nodes, TensorParallelGroupsOnOneNodeSayNothing) {
  for (const auto& result : testing::on_processes(6, "mesh over nodes", "by node", "gloo")) {
    EXPECT_EQ(result.exit_code, 0) << result.result;
    EXPECT_EQ(result.result, "");
  }
}

TEST(Nodes, TensorParallelGroupsThatCrossAreNamedOnce) {
  const auto results = testing::on_processes(6, "mesh over nodes", "round robin", "gloo");
  for (size_t r = 0; r < results.size(); ++r) {
    EXPECT_EQ(results[r].exit_code, 0) << results[r].result;
    if (r == 0) continue;
    EXPECT_EQ(results[r].result, "") << "rank " << r;
  }
  EXPECT_THAT(results[0].result, HasSubstr("warning: mesh dp=2 x tp=3: 2 of 2 groups along tp cross nodes, for instance ranks 0, 1, 2 on "));
  EXPECT_THAT(results[0].result, HasSubstr("(node 0), "));
  EXPECT_THAT(results[0].result, HasSubstr("(node 1);"));
}

}  // namespace
}  // namespace weft
