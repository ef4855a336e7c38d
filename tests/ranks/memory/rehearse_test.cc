// A rehearsal on the meta device, alone, holds what each rank of the real run holds.
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/ranks/memory/formulas.h"
#include "tests/ranks/memory/trainer_usage.h"
#include "weft/train/rehearse.h"

namespace weft {
namespace {

config::RunConfig configuration(const char* dtype, int64_t zero) {
  config::RunConfig c;
  c.model.layers = 3;
  c.model.hidden = 48;
  c.model.heads = 3;
  c.model.kv_heads = 1;
  c.model.vocab = 300;
  c.data.seq = 40;
  c.train.global_batch = 12;
  c.train.micro_batch = 2;
  c.train.dtype = dtype;
  c.parallel.zero = zero;
  return c;
}

/// Parameters and gradients of the largest group that is gathered and reduced at once.
int64_t bytes_of_largest_group(const config::RunConfig& c, int ranks) {
  int64_t longest = 0;
  for (const testing::Group& group : testing::groups_of(c)) longest = std::max(longest, group.length(ranks));
  return 2 * longest * (c.train.dtype == "fp64" ? 8 : 4);
}

void check(const char* dtype, int64_t zero, int ranks) {
  const testing::TrainerRun run(configuration(dtype, zero));
  const std::vector<memory::Usage> usages = run.usage(ranks);
  for (int rank = 0; rank < ranks && !usages.empty(); ++rank) {
    SCOPED_TRACE(std::string(dtype) + ", zero " + std::to_string(zero) + ", rank " + std::to_string(rank) + " of " + std::to_string(ranks));
    const memory::Usage& real = usages[static_cast<size_t>(rank)];
    const memory::Usage rehearsed = train::rehearse(run.config(), rank, ranks).memory;
    if (zero <= 1) {
      EXPECT_EQ(real.peak, rehearsed.peak);
      EXPECT_EQ(real.live, rehearsed.live);
      EXPECT_EQ(real.at_peak, rehearsed.at_peak);
    } else {
      // How far the peers are decides which Unit is still there, and whether a gradient needs a buffer beside the pool's.
      EXPECT_LE(std::abs(real.peak - rehearsed.peak), bytes_of_largest_group(run.config(), ranks));
    }
    EXPECT_GT(rehearsed.at_peak[static_cast<size_t>(memory::Category::activations)], 0);
  }
}

TEST(Rehearsal, HoldsWhatTheRealRunHolds) {
  check("fp32", 0, 1);
  check("fp64", 0, 3);
  check("fp32", 1, 2);
  check("fp32", 2, 3);
  check("fp64", 3, 2);
  check("fp32", 3, 3);
}

}  // namespace
}  // namespace weft
