// The whole peak of a training step against closed forms: model states (formulas.h), the activations that the planner counts
// for a block (cost::block_bytes; Korthikanti et al. 2022 with a flash kernel), and what the last layers add.
#include <gtest/gtest.h>

#include "tests/ranks/memory/formulas.h"
#include "tests/ranks/memory/trainer_usage.h"
#include "weft/cost/memory.h"

namespace weft {
namespace {

using testing::Case;

/// A model whose activations outweigh its states.
config::RunConfig configuration(const Case& bytes, int64_t vocab, int64_t zero, const char* recompute) {
  config::RunConfig c;
  c.model.layers = 3;
  c.model.hidden = 96;
  c.model.heads = 3;
  c.model.vocab = vocab;
  c.data.seq = 128;
  c.train.global_batch = 12;
  c.train.micro_batch = 4;
  c.train.dtype = bytes.dtype;
  c.train.recompute = recompute;
  c.parallel.zero = zero;
  return c;
}

/// Bytes of one rank at the highest of two moments: in the loss, when all blocks wait for their backward, and in the backward of
/// the last block's MLP.
double formula(const Case& bytes, const config::RunConfig& c, int64_t rank, int64_t ranks) {
  const model::ModelSpec spec = config::model_spec(c, c.model.vocab);
  const auto element = static_cast<double>(bytes.weight), tokens = static_cast<double>(c.train.micro_batch * c.data.seq);
  const auto hidden = static_cast<double>(spec.hidden), vocab = static_cast<double>(spec.vocab), ffn = static_cast<double>(spec.blocks[0].mlp.ffn);
  cost::ActivationShape shape;
  shape.tokens = tokens;
  shape.sequence = static_cast<double>(c.data.seq);
  const double block = cost::block_bytes(spec.blocks[0], hidden, false, shape, {}).total() * element / 2;  // it counts 16 bits
  // Recomputed, a block leaves its input, and is there as a whole while it is in backward.
  const bool again = c.train.recompute == "full";
  const double input = element * tokens * hidden, blocks = static_cast<double>(c.model.layers) * (again ? input : block);

  const testing::States states = testing::states_of(bytes, c, rank, ranks);
  const auto kept = static_cast<double>(states.parameters + states.gradients + states.optimizer);
  const double head = c.parallel.zero == 3 ? element * vocab * hidden : 0;  // gathered
  const double last = 2 * element * tokens * hidden;                        // the final norm's input and output
  const double loss = element * (tokens * vocab + tokens * hidden + vocab * hidden);  // logits, both gradients
  const double mlp_backward = element * tokens * (2 * hidden + 3 * ffn);
  const double unit = c.parallel.zero == 3 ? static_cast<double>(states.two_units) / 2 : 0;
  // In the gradient of the gate, the product and its own gradient's input are gone: counted here, where the rest is little.
  const double gone = element * tokens * (ffn + hidden);
  return kept + blocks + std::max(last + loss + head, (again ? block - input - gone : 0) + mlp_backward + unit);
}

void check(const Case& bytes, int ranks, int64_t vocab, int64_t zero, const char* recompute = "none") {
  constexpr double kTolerance = 0.05;  // formulas leave out rows of statistics, token ids and scratch
  const config::RunConfig c = configuration(bytes, vocab, zero, recompute);
  int rank = 0;
  for (const memory::Usage& usage : testing::TrainerRun(c).usage(ranks)) {
    const double want = formula(bytes, c, rank, ranks);
    EXPECT_NEAR(static_cast<double>(usage.peak), want, kTolerance * want)
        << bytes.dtype << ", zero " << zero << ", vocabulary " << vocab << ", recompute " << recompute << ", rank " << rank++ << " of " << ranks;
  }
}

TEST(Peak, IsThatOfTheFormulas) {
  check(testing::kFp32, 1, 64, 0);
  check(testing::kBf16, 1, 2000, 0);
  check(testing::kFp32, 3, 2000, 0);
  check(testing::kBf16, 2, 64, 1);
  check(testing::kFp32, 3, 64, 2);
  check(testing::kFp32, 2, 2000, 3);
  check(testing::kBf16, 3, 64, 3);
  check(testing::kFp32, 1, 64, 0, "full");
}

}  // namespace
}  // namespace weft
