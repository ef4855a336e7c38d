#include "weft/schedule/passes.h"

#include <gtest/gtest.h>

#include "tests/unit/schedule/schedules.h"
#include "weft/schedule/text.h"
#include "weft/schedule/timeline.h"
#include "weft/schedule/validate.h"

namespace weft::schedule {
namespace {

TEST(Passes, CommunicationAndSharding) {
  Schedule schedule = one_f_one_b({2, 2, 1});
  add_communication(schedule);
  add_sharding(schedule);
  EXPECT_EQ(to_text(schedule),
            "rank 0: UNSHARD F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1 REDUCE RESHARD\n"
            "rank 1: RECV_F0 UNSHARD F0 RECV_F1 B0 SEND_B0 F1 B1 SEND_B1 REDUCE RESHARD\n");
}

/// Runs the lists as if SEND and RECV blocked until both sides are there.
bool runs_with_blocking_transfers(const Schedule& schedule) {
  std::vector<size_t> step(schedule.ranks.size(), 0);
  const auto at = [&](size_t rank) -> const Action* {
    return step[rank] < schedule.ranks[rank].size() ? &schedule.ranks[rank][step[rank]] : nullptr;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t rank = 0; rank < step.size(); ++rank) {
      const Action* a = at(rank);
      if (!a) continue;
      const bool activation = a->kind == Kind::send_activation;
      if (activation || a->kind == Kind::send_grad) {
        const int to_stage = a->stage + (activation ? 1 : -1);
        const size_t to = static_cast<size_t>(schedule.owner[static_cast<size_t>(to_stage)]);
        const Action expected{activation ? Kind::recv_activation : Kind::recv_grad, false, a->micro_batch, to_stage};
        if (!at(to) || *at(to) != expected) continue;
        ++step[to];
      } else if (a->kind == Kind::recv_activation || a->kind == Kind::recv_grad) {
        continue;  // its sender moves both on
      }
      ++step[rank];
      moved = true;
    }
  }
  for (size_t rank = 0; rank < step.size(); ++rank) {
    if (at(rank)) return false;
  }
  return true;
}

TEST(Passes, RandomSchedulesStayValid) {
  std::mt19937 random(11);
  for (int k = 0; k < 2000; ++k) {
    const test::Draw draw = test::draw(random, 7, 20);
    SCOPED_TRACE(draw.text());
    const Schedule plain = draw.generator->make(draw.sizes);
    Schedule schedule = plain;
    add_communication(schedule);
    ASSERT_TRUE(runs_with_blocking_transfers(schedule)) << to_text(schedule);
    const Sharding sharding{.whole_stages = 1 + k % 3};
    add_sharding(schedule, sharding);
    const auto fault = validate(schedule);
    ASSERT_FALSE(fault) << fault->text() << "\n" << to_text(schedule);

    for (const auto& list : schedule.ranks) {  // no more parameters whole than asked; a pair may need two stages
      int whole = 0;
      const bool pairs = std::any_of(list.begin(), list.end(), [](const Action& a) { return a.with_next; });
      for (const Action& a : list) {
        whole += (a.kind == Kind::unshard) - (a.kind == Kind::reshard);
        ASSERT_LE(whole, std::max(sharding.whole_stages, pairs ? 2 : 1));
      }
    }
    // Free transfers change nothing about the time.
    const Times times = Times::uniform(plain.stage_count(), 1, 1, 1);
    ASSERT_DOUBLE_EQ(run(schedule, times).makespan, run(plain, times).makespan);
    strip_communication(schedule);
    ASSERT_EQ(schedule.ranks, plain.ranks);
  }
}

TEST(Passes, SplitAndMergeAreInverse) {
  Schedule split = interleaved({3, 6, 2});
  const Schedule whole = split;
  for (auto& list : split.ranks) split_backward(list, 0);
  EXPECT_NE(split.ranks, whole.ranks);
  merge_backward(split);
  EXPECT_EQ(split.ranks, whole.ranks);
  Schedule late = zb_h1({4, 8, 1});  // rank 0 runs W at once, the others later
  merge_backward(late);
  EXPECT_EQ(to_text(late).find("I"), to_text(late).find("I0", to_text(late).find("rank 1")));
  EXPECT_FALSE(validate(late));
}

TEST(Passes, ReductionAloneForDataParallelism) {
  Schedule schedule = zb_v({3, 5, 2});
  add_communication(schedule);
  add_reduction(schedule);
  EXPECT_FALSE(validate(schedule));
  EXPECT_EQ(to_text(schedule).find("SHARD"), std::string::npos);
  EXPECT_NE(to_text(schedule).find("REDUCE.5"), std::string::npos);
}

TEST(Passes, TransfersOfOneRankFollowEachOther) {
  // One rank sends two activations back to back; the second arrives a transfer later.
  Schedule schedule = gpipe({2, 2, 1});
  add_communication(schedule);
  const Timeline timeline = run(schedule, Times::uniform(2, 1, 1, 1, 3));
  // F0 ends 1, arrives 4; F1 ends 2, leaves at 4, arrives 7, runs to 8; B0 8-10, B1 10-12; gradients 10-13, 13-16; B1
  // 16-18.
  EXPECT_DOUBLE_EQ(timeline.makespan, 18);
}

}  // namespace
}  // namespace weft::schedule
