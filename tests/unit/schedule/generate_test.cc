#include "weft/schedule/generate.h"

#include <gtest/gtest.h>

#include "tests/unit/schedule/schedules.h"
#include "weft/schedule/count.h"
#include "weft/schedule/text.h"
#include "weft/schedule/timeline.h"
#include "weft/schedule/validate.h"

namespace weft::schedule {
namespace {

TEST(Generate, GoldenActionLists) {
  const auto cases = test::golden_cases();
  ASSERT_GE(cases.size(), 12u);
  for (const auto& golden : cases) {
    const Schedule schedule = generate(golden.at("schedule").get<std::string>(), test::sizes_of(golden));
    EXPECT_EQ(to_text(schedule), golden.at("text").get<std::string>());
  }
}

TEST(Generate, GoldenTimesAndCounts) {
  for (const auto& golden : test::golden_cases()) {
    if (!golden.contains("makespan")) continue;
    SCOPED_TRACE(golden.at("schedule").get<std::string>() + " p=" + std::to_string(golden.at("ranks").get<int>()));
    const Schedule schedule = generate(golden.at("schedule").get<std::string>(), test::sizes_of(golden));
    const Timeline timeline = run(schedule, Times::uniform(schedule.stage_count(), 1, 1, 1));
    EXPECT_EQ(timeline.makespan, golden.at("makespan").get<double>());
    for (int rank = 0; rank < schedule.rank_count(); ++rank) {
      const size_t r = static_cast<size_t>(rank);
      EXPECT_EQ(timeline.idle(rank), golden.at("idle").get<double>());
      EXPECT_EQ(timeline.last[r] - timeline.first[r] - timeline.busy[r], golden.at("inner_idle")[r].get<double>());
    }
    const InFlight counts = in_flight(schedule);
    EXPECT_EQ(counts.to_input_grad, golden.at("in_flight_to_I").get<std::vector<int>>());
    EXPECT_EQ(counts.to_weight_grad, golden.at("in_flight_to_W").get<std::vector<int>>());
  }
}

TEST(Generate, DualPipeVPairsAsOneSlot) {
  for (const auto& [p, m, makespan] : {std::tuple{2, 4, 26.0}, std::tuple{4, 8, 54.0}}) {
    const Schedule schedule = dualpipe_v({p, m, 2});
    Times times = Times::uniform(schedule.stage_count(), 1, 1, 1);
    times.pair = 1;
    EXPECT_EQ(run(schedule, times).makespan, makespan);
  }
}

// Property: whatever the sizes, the result is valid and runs to its end; claims about memory hold.
TEST(Generate, RandomSizesAreValidAndRun) {
  std::mt19937 random(20240607);
  int fewer_than_ranks = 0, not_multiples = 0;
  for (int k = 0; k < 2500; ++k) {
    const test::Draw draw = test::draw(random, 9, 33);
    SCOPED_TRACE(draw.text());
    const Schedule schedule = draw.generator->make(draw.sizes);
    const auto fault = validate(schedule);
    ASSERT_FALSE(fault) << fault->text();
    const Timeline timeline = run(schedule, Times::uniform(schedule.stage_count(), 1, 1.25, 0.75, 0.125));
    const double work = (schedule.forward_only ? 1.0 : 3.0) * draw.sizes.micro_batches * draw.sizes.chunks;
    for (double busy : timeline.busy) ASSERT_NEAR(busy, work, 1e-9);
    ASSERT_GE(timeline.makespan, work);
    fewer_than_ranks += draw.sizes.micro_batches < draw.sizes.ranks;
    not_multiples += draw.sizes.micro_batches % draw.sizes.ranks != 0;
  }
  EXPECT_GT(fewer_than_ranks, 100);
  EXPECT_GT(not_multiples, 1000);
}

TEST(Generate, MemoryInFlight) {
  for (int p : {1, 2, 3, 5, 8}) {
    for (int m : {1, 2, 7, 8, 24}) {
      SCOPED_TRACE(testing::Message() << "p=" << p << " m=" << m);
      const InFlight one = in_flight(one_f_one_b({p, m, 1})), zero = in_flight(zb_h1({p, m, 1})),
                     all = in_flight(gpipe({p, m, 1}));
      for (int i = 0; i < p; ++i) {
        const size_t r = static_cast<size_t>(i);
        EXPECT_EQ(one.to_input_grad[r], std::min(m, p - i));
        EXPECT_EQ(zero.to_input_grad[r], std::min(m, p - i));
        EXPECT_EQ(zero.to_weight_grad[r], std::min(m, p));
        EXPECT_EQ(all.to_input_grad[r], m);
        for (int v : {2, 3}) {
          if (m % p != 0 || p == 1) continue;
          EXPECT_EQ(in_flight(interleaved({p, m, v})).to_input_grad[r],
                    std::min(m * v, 2 * (p - 1 - i) + (v - 1) * p + 1));
        }
      }
    }
  }
  for (int p : {2, 4, 8}) {
    for (int count : in_flight(zb_v({p, 4 * p, 2})).to_input_grad) EXPECT_EQ(count, 2 * p);
    for (int count : in_flight(dualpipe_v({p, 4 * p, 2})).to_input_grad) EXPECT_EQ(count, 2 * p + 1);
  }
}

TEST(Generate, RefusesImpossibleSizesWithLegalValues) {
  const auto text = [](std::string_view name, Sizes sizes) {
    try {
      (void)generate(name, sizes);
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_NE(text("1f1b", {0, 4, 1}).find("ranks: is 0, must be at least 1"), std::string::npos);
  EXPECT_NE(text("1f1b", {2, -3, 1}).find("microbatches: is -3, must be at least 1"), std::string::npos);
  EXPECT_NE(text("zb-v", {2, 4, 3}).find("has exactly 2 per rank"), std::string::npos);
  EXPECT_NE(text("1f1b", {2, 4, 2}).find("interleaved"), std::string::npos);
  EXPECT_NE(text("1f2b", {2, 4, 1}).find("did you mean 1f1b"), std::string::npos);
  EXPECT_NE(text("gpipe", {100000, 100000, 1}).find("at most"), std::string::npos);
  const std::string both = text("gpipe", {0, 0, 0});  // every finding at once
  EXPECT_NE(both.find("ranks"), std::string::npos);
  EXPECT_NE(both.find("microbatches"), std::string::npos);
  EXPECT_NE(both.find("chunks"), std::string::npos);
}

}  // namespace
}  // namespace weft::schedule
