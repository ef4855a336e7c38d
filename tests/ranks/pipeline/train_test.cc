// Weft's own models over pipeline stages: training runs against one rank, as `weft verify` compares them.
#include "tests/ranks/tensor/verify_models.h"
#include "tests/support/ranks.h"
#include "weft/core/error.h"
#include "weft/model/presets.h"
#include "weft/train/stages.h"

namespace weft {
namespace {

TEST(PipelineTraining, ModelsUnderSchedulesEqualOneRank) {
  const auto layouts = [](const char* text) { return train::split_layouts(text); };
  testing::expect_verified(testing::kVerifyModels[0], layouts("pp=2,micro_batch=2; pp=3,schedule=zb-h1,micro_batch=1; pp=2,schedule=zb-v,micro_batch=2"));
  testing::expect_verified(testing::kVerifyModels[1], layouts("pp=2,schedule=zb-h1,dp_shard=2,zero=3,tp=2,micro_batch=1,train.recompute=full; pp=4,micro_batch=3; "
                                                              "pp=2,dp=2,schedule=interleaved,micro_batch=1,train.recompute=keep_attention"));
  testing::expect_verified(testing::kVerifyModels[2], layouts("pp=2,dp=2,tp=2,micro_batch=2; pp=2,dp_shard=2,zero=2,schedule=dualpipe-v,micro_batch=1"));
  testing::expect_verified(testing::kVerifyModels[5], layouts("pp=2,schedule=zb-h1,tp=2,sequence_parallel=true,micro_batch=2; pp=2,schedule=gpipe,dp=2,zero=1,micro_batch=1"));
}

TEST(PipelineTraining, LossesInFp32AreOneRanks) {
  testing::expect_verified(testing::kVerifyModels[1], train::split_layouts("pp=2,micro_batch=2; pp=2,schedule=zb-h1,dp=2,micro_batch=1"), "fp32");
}

/// A copy of the tied embedding that drifts, and a stage's gradient that is wrong.
TEST(PipelineTraining, VerifyFindsWhatIsBroken) {
  testing::TempDir dir;
  testing::write_verify_tokens(dir / "tokens.bin");
  const auto config = testing::verify_config(testing::kVerifyModels[0], dir / "tokens.bin");
  const auto first_of = [&](const std::string& name, const std::function<void(at::Tensor&)>& fault) {
    train::VerifyOptions options{.steps = 2};
    options.on_built = [&](train::Learner& learner, const World& world) {
      if (at::Tensor* p = learner.model()->named_parameters().find(name); p != nullptr && world.rank() == 1) fault(*p);
    };
    return train::verify(config, {"pp=2,micro_batch=2"}, options).rows.front().first;
  };
  EXPECT_EQ(first_of("norm.weight", [](at::Tensor& p) { p.register_hook([](const at::Tensor& g) { return g * 1.001; }); }).substr(0, 23), "gradient of norm.weight");
  const auto nudge = [](at::Tensor& p) {
    const at::NoGradGuard no_grad;
    p.flatten()[3].add_(1e-3);
  };
  EXPECT_NE(first_of("tok.weight", nudge), "");
}

TEST(PipelineStages, EveryLayerOnceByCost) {
  model::ModelSpec spec = model::preset("llama-tiny");
  spec.blocks.resize(30, spec.blocks.front());
  for (const int64_t stages : {1, 2, 4, 7, 8, 32}) {
    int64_t next = 0, least = 100, most = 0;
    const auto parts = models::stage_parts(spec, stages, 64);
    ASSERT_EQ(std::ssize(parts), stages);
    for (size_t s = 0; s < parts.size(); ++s) {
      EXPECT_EQ(parts[s].first, next);
      next = parts[s].end;
      EXPECT_EQ(parts[s].embedding, s == 0);
      EXPECT_EQ(parts[s].head, s + 1 == parts.size());
      if (s + 1 == parts.size()) continue;  // the head takes the place of layers
      least = std::min(least, parts[s].end - parts[s].first);
      most = std::max(most, parts[s].end - parts[s].first);
    }
    EXPECT_EQ(next, 30);
    if (stages > 1 && stages < 9) {
      EXPECT_LE(most - least, 1) << stages;
    }
  }
  EXPECT_THROW(models::stage_parts(spec, 33, 64), ConfigError);
}

}  // namespace
}  // namespace weft
