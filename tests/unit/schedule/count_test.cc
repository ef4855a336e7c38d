#include "weft/schedule/count.h"

#include <gtest/gtest.h>

#include "weft/schedule/timeline.h"

namespace weft::schedule {
namespace {

// Wherever a closed form is stated, the simulation gives the same idle time on every rank.
TEST(ClosedForm, EqualsTheSimulation) {
  const std::vector<UnitTimes> all_times = {{1, 1, 1}, {1, 1.25, 0.75}, {2, 3, 1}, {1, 2, 1.5}, {0.5, 0.25, 2}};
  std::map<std::string, int> checked;
  for (const Generator& generator : generators()) {
    for (int p = 1; p <= 6; ++p) {
      for (int m = 1; m <= 25; ++m) {
        for (int v = 1; v <= 3; ++v) {
          if (generator.fixed_chunks && v != generator.fixed_chunks) continue;
          for (const UnitTimes& t : all_times) {
            const Sizes sizes{p, m, v};
            const auto form = closed_form(generator.name, sizes, t);
            if (!form) continue;
            const Schedule schedule = generator.make(sizes);
            const Timeline timeline =
                run(schedule, Times::uniform(schedule.stage_count(), t.forward, t.input_grad, t.weight_grad));
            ASSERT_NEAR(timeline.bubble(), form->fraction, 1e-12)
                << generator.name << " p=" << p << " m=" << m << " v=" << v << " F=" << t.forward;
            for (int rank = 0; rank < p; ++rank)
              ASSERT_NEAR(timeline.idle(rank), form->idle, 1e-9)
                  << generator.name << " p=" << p << " m=" << m << " v=" << v;
            ++checked[std::string(generator.name)];
          }
        }
      }
    }
  }
  for (const Generator& generator : generators()) EXPECT_GT(checked[std::string(generator.name)], 50) << generator.name;
}

TEST(ClosedForm, KnownFractions) {
  EXPECT_DOUBLE_EQ(closed_form("gpipe", {4, 8, 1}, {})->fraction, 3.0 / 11);
  EXPECT_DOUBLE_EQ(closed_form("1f1b", {8, 32, 1}, {1, 1.5, 0.25})->fraction, 7.0 / 39);
  EXPECT_NEAR(closed_form("interleaved", {4, 8, 2}, {})->fraction, 0.1579, 5e-5);
  EXPECT_NEAR(closed_form("zb-h1", {4, 8, 1}, {})->fraction, 0.1111, 5e-5);
  EXPECT_NEAR(closed_form("zb-v", {4, 8, 2}, {})->fraction, 0.0588, 5e-5);
  EXPECT_FALSE(closed_form("zb-v", {4, 8, 2}, {1, 2, 1}));
  EXPECT_FALSE(closed_form("interleaved", {4, 7, 2}, {}));
}

}  // namespace
}  // namespace weft::schedule
