#include "weft/schedule/text.h"

#include <gtest/gtest.h>

#include "tests/support/message.h"
#include "tests/unit/schedule/schedules.h"
#include "weft/core/error.h"
#include "weft/schedule/passes.h"
#include "weft/schedule/validate.h"

namespace weft::schedule {
namespace {

TEST(Text, RoundTripsExactly) {
  std::mt19937 random(7);
  for (int k = 0; k < 300; ++k) {
    const test::Draw draw = test::draw(random, 6, 12);
    SCOPED_TRACE(draw.text());
    Schedule schedule = draw.generator->make(draw.sizes);
    if (k % 3 > 0) add_communication(schedule);
    if (k % 3 == 2) add_sharding(schedule);
    const Schedule back = from_text(to_text(schedule)), from_cells = from_csv(to_csv(schedule));
    ASSERT_EQ(back.ranks, schedule.ranks);
    ASSERT_EQ(from_cells.ranks, schedule.ranks);
    ASSERT_EQ(back.owner, schedule.owner);
    ASSERT_EQ(back.micro_batches, schedule.micro_batches);
    ASSERT_EQ(back.forward_only, schedule.forward_only);
    ASSERT_EQ(to_text(back), to_text(schedule));
    ASSERT_EQ(to_csv(from_cells), to_csv(schedule));
  }
}

// As torch.distributed.pipelining prints and reads it: stage, kind, micro-batch; empty cells are idle slots.
TEST(Text, CsvIsPyTorchsLayout) {
  EXPECT_EQ(to_csv(one_f_one_b({2, 2, 1})), "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
  Schedule pairs = from_text("rank 0: F0 (F1+B0) B1\n");
  EXPECT_EQ(to_csv(pairs), "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n");
  Schedule with_all = from_csv(
      "0UNSHARD,0F0,0SEND_F0,,,0RECV_B0,0I0,0W0,0REDUCE_GRAD,0RESHARD\r\n,1UNSHARD,1RECV_F0,1F0,1I0,1SEND_B0,1W0,"
      "1REDUCE_GRAD,1WAIT_SEND_B0,1RESHARD\n");
  EXPECT_EQ(with_all.ranks[0].size(), 8u);
  EXPECT_FALSE(validate(with_all)) << validate(with_all)->text();
  EXPECT_EQ(to_text(with_all),
            "rank 0: UNSHARD F0 SEND_F0 RECV_B0 I0 W0 REDUCE RESHARD\nrank 1: UNSHARD RECV_F0 F0 I0 SEND_B0 W0 REDUCE "
            "RESHARD\n");
}

TEST(Text, RefusesWhatItCannotRead) {
  EXPECT_NE(testing::config_error([] { return from_text("rank 0: F0 X1 B0"); }).find("rank 0 step 1: \"X1\""), std::string::npos);
  EXPECT_NE(testing::config_error([] { return from_text("rank 0: F0 B0\nrank 2: F0 B0"); }).find("\"rank 1:\""), std::string::npos);
  EXPECT_NE(testing::config_error([] {
              return from_text("rank 0: F0.0 F0.1\nrank 1: F0.1");
            }).find("rank 1 step 0: F0.1 runs on stage 1, which rank 0 holds"),
            std::string::npos);
  EXPECT_NE(testing::config_error([] { return from_text("rank 0: F0.0 F0.2 B0.2 B0.0"); }).find("stage 1"), std::string::npos);
  EXPECT_NE(testing::config_error([] { return from_text("rank 0: (F0.0+B0.0"); }).find("step 0"), std::string::npos);
  EXPECT_NE(testing::config_error([] { return from_text("rank 0: F99999999999.0"); }).find("step 0"), std::string::npos);
  EXPECT_NE(testing::config_error([] { return from_text("rank 0: F-1.0"); }).find("step 0"), std::string::npos);
  EXPECT_NE(testing::config_error([] { return from_text(""); }).find("no actions"), std::string::npos);
  EXPECT_NE(testing::config_error([] { return from_csv("0F0,0B\n"); }).find("rank 0 step 1: \"0B\""), std::string::npos);
  EXPECT_NE(testing::config_error([] { return from_csv("0F0,F0\n"); }).find("rank 0 step 1: \"F0\""), std::string::npos);
}

}  // namespace
}  // namespace weft::schedule
