// Bytes of model states of the trainer, by category, against the table in docs/memory.md: 16 bytes per parameter in fp32,
// 18 in bf16 with fp32 gradients and master weights (ZeRO: Memory Optimizations, Rajbhandari et al. 2020, section 3.1; Megatron-LM's
// distributed optimizer documentation for 18).
#include <gtest/gtest.h>

#include "tests/ranks/memory/formulas.h"
#include "tests/ranks/memory/trainer_usage.h"

namespace weft {
namespace {

using memory::Category;
using testing::Case;
using testing::kBf16, testing::kFp16, testing::kFp32, testing::kLow;

config::RunConfig configuration(const Case& bytes, int64_t hidden, int64_t zero) {
  config::RunConfig c;
  c.model.layers = 2;
  c.model.hidden = hidden;
  c.model.heads = 2;
  c.model.vocab = 64;
  c.data.seq = 8;
  c.train.global_batch = 12;
  c.train.dtype = bytes.dtype;
  c.train.gradient_dtype = bytes.gradient == 2 ? "bf16" : "fp32";
  c.parallel.zero = zero;
  return c;
}

void expect_states(const memory::Usage& usage, const testing::States& want, bool gradients_stay, bool in_place) {
  EXPECT_EQ(usage.of(Category::parameters), want.parameters);
  EXPECT_EQ(gradients_stay ? usage.of(Category::gradients) : usage.peak_by(Category::gradients), want.gradients);
  EXPECT_EQ(usage.of(Category::optimizer), want.optimizer);
  if (in_place) {
    EXPECT_EQ(usage.peak_by(Category::optimizer), want.optimizer) << "the update allocates nothing else";
  }
  EXPECT_EQ(usage.of(Category::activations), 0) << "freed with the step";
  EXPECT_GT(usage.peak_by(Category::activations), 0);
  EXPECT_GT(usage.peak, want.parameters);
}

void check(const Case& bytes, int ranks, int64_t hidden, int64_t zero = 0, const config::OptimizerConfig& optimizer = {}) {
  config::RunConfig c = configuration(bytes, hidden, zero);
  c.optimizer = optimizer;
  // These two work on copies: updates of whole matrices, gradients in fp32.
  const bool in_place = optimizer.name != "muon" && optimizer.name != "adafactor";
  int rank = 0;
  for (const memory::Usage& usage : testing::TrainerRun(c).usage(ranks)) {
    SCOPED_TRACE("zero " + std::to_string(zero) + ", rank " + std::to_string(rank) + " of " + std::to_string(ranks));
    const testing::States want = testing::states_of(bytes, c, rank++, ranks);
    const bool autograd_owns_gradients = ranks == 1 && bytes.weight == bytes.gradient;
    expect_states(usage, want, !autograd_owns_gradients, in_place);
    if (zero == 3) {
      EXPECT_LE(usage.peak_by(Category::parameters), want.parameters + want.two_units);
    }
  }
}

TEST(ModelStates, SixteenBytesPerParameterInFp32) {
  check(kFp32, 1, 32);
  check(kFp32, 2, 32);
}
TEST(ModelStates, EighteenBytesPerParameterInBf16WithFp32Gradients) {
  check(kBf16, 1, 32);
  check(kBf16, 3, 32);
}
TEST(ModelStates, SixteenBytesPerParameterInBf16WithBf16Gradients) { check(kLow, 2, 32); }
TEST(ModelStates, EighteenBytesPerParameterInFp16WithFp32Gradients) { check(kFp16, 2, 32); }
TEST(ModelStates, PaddingIsAsStated) { check(kBf16, 2, 20); }

// What a rank keeps under ZeRO (bf16: 2 + 4 + 12/n, 2 + (4 + 12)/n, (2 + 4 + 12)/n and so on), to the byte.
TEST(ModelStates, ZeroOneSharesOutTheOptimizer) {
  check(kBf16, 3, 32, 1);
  check(kFp32, 2, 20, 1);
}
TEST(ModelStates, ZeroTwoSharesOutGradientsToo) {
  check(kBf16, 2, 32, 2);
  check(kLow, 3, 20, 2);
}
TEST(ModelStates, ZeroThreeSharesOutEverythingAndHoldsTwoUnitsMore) {
  check(kBf16, 4, 32, 3);
  check(kFp32, 3, 20, 3);
  check(kFp16, 2, 32, 3);
}

// Masters and moments: 4 + 4, 4 + 4, 2.03, rows + columns, 4 + 4 (matrices) in place of AdamW's 8 and 12; shared out as those are.
TEST(ModelStates, OtherOptimizersKeepLess) {
  constexpr Case kNoMasters{"fp32", 4, 4, 0}, kMasters{"bf16", 2, 4, 4};
  check(kMasters, 3, 64, 1, {.name = "lion"});
  check(kMasters, 2, 64, 1, {.moments_dtype = "bf16"});
  check(kNoMasters, 1, 64, 0, {.name = "sgd"});
  check(kNoMasters, 3, 64, 2, {.name = "adam8bit"});
  check(kNoMasters, 2, 64, 3, {.name = "adam8bit"});
  check(kNoMasters, 3, 64, 2, {.name = "adafactor"});
  check(kMasters, 2, 64, 3, {.name = "muon"});
}

}  // namespace
}  // namespace weft
