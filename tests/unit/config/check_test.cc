#include "weft/config/check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace weft::config {
namespace {

using ::testing::HasSubstr;

std::string model_error(const RunConfig& config, int64_t data_vocab = 0) {
  try {
    model_spec(config, data_vocab);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

RunConfig sizes(int64_t layers, int64_t hidden, int64_t heads) {
  RunConfig config;
  config.model.layers = layers;
  config.model.hidden = hidden;
  config.model.heads = heads;
  return config;
}

TEST(ModelSpec, SizesAloneMakeALlama) {
  const model::ModelSpec spec = model_spec(sizes(3, 48, 4), 256);
  EXPECT_EQ(spec.family, "llama");
  EXPECT_EQ(spec.layers(), 3);
  EXPECT_EQ(spec.vocab, 256);
  EXPECT_EQ(spec.context, 256);  // data.seq
  EXPECT_EQ(spec.blocks[2].attention.kv_heads, 4);
  EXPECT_EQ(spec.blocks[2].attention.head_dim, 12);
  EXPECT_EQ(spec.blocks[2].mlp.ffn, 128);
  EXPECT_EQ(spec.rope.theta, 10000.0);
  EXPECT_FALSE(spec.tied_head);
}

TEST(ModelSpec, PresetSizesCanBeReplaced) {
  RunConfig config;
  config.model.preset = "gpt2";
  EXPECT_EQ(model_spec(config, 0).vocab, 50257);
  EXPECT_EQ(model_spec(config, 0).context, 1024);
  EXPECT_EQ(model_spec(config, 256).vocab, 256);
  config.model.layers = 2;
  config.model.hidden = 96;
  config.model.heads = 6;
  config.model.tied_head = "no";
  const model::ModelSpec spec = model_spec(config, 256);
  EXPECT_EQ(spec.layers(), 2);
  EXPECT_EQ(spec.blocks[0].mlp.ffn, 384);
  EXPECT_EQ(spec.blocks[0].attention.head_dim, 16);
  EXPECT_EQ(spec.blocks[0].attention.kv_heads, 6);
  EXPECT_FALSE(spec.tied_head);
}

TEST(ModelSpec, SizesBeyondAnyModelAreRefusedBeforeTheyOverflow) {
  EXPECT_THAT(model_error(sizes(10000, 10000000, 100), 256), HasSubstr("parameters; the largest model"));
  RunConfig config = sizes(2, 32, 2);
  config.data.train = "x";
  config.train.global_batch = 1000000000;
  Findings findings;
  check(config, findings);
  EXPECT_THAT(findings.text(), HasSubstr("2.6e+11 tokens per step"));
}

TEST(ModelSpec, EveryMistakeIsNamed) {
  EXPECT_THAT(model_error(RunConfig(), 256), HasSubstr("model.layers: missing"));
  EXPECT_THAT(model_error(RunConfig(), 256), HasSubstr("model.hidden: missing"));
  EXPECT_THAT(model_error(sizes(2, 30, 4), 256), HasSubstr("4 heads do not divide hidden = 30"));
  EXPECT_THAT(model_error(sizes(2, 12, 4), 256), HasSubstr("rotary"));
  RunConfig config = sizes(2, 32, 4);
  config.model.kv_heads = 3;
  config.model.vocab = 100;
  config.model.context = 64;
  const std::string error = model_error(config, 256);
  EXPECT_THAT(error, HasSubstr("3 does not divide heads = 4"));
  EXPECT_THAT(error, HasSubstr("100 is less than the data's vocabulary of 256"));
  EXPECT_THAT(error, HasSubstr("256 tokens exceed the model's context of 64"));
}

TEST(Offload, NeedsAFolderAndAnOptimizerOfElements) {
  const auto text = [](const OffloadConfig& offload, const std::string& optimizer, int64_t zero = 3) {
    RunConfig config;
    config.parallel.zero = zero;
    config.data.train = "x.bin";
    config.offload = offload;
    config.optimizer.name = optimizer;
    Findings findings;
    check(config, findings);
    try {
      findings.throw_if_any("configuration");
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(text({.optimizer = "nvme", .dir = "/disk"}, "adamw"), "no error");
  EXPECT_EQ(text({.optimizer = "cpu"}, "sgd"), "no error");
  EXPECT_EQ(text({.optimizer = "nvme", .parameters = "cpu", .dir = "/disk"}, "adamw"), "no error");
  EXPECT_THAT(text({.parameters = "cpu"}, "adamw", 2), HasSubstr("offload.parameters: cpu with parallel.zero = 2"));
  EXPECT_THAT(text({.parameters = "nvme"}, "adamw"), HasSubstr("offload.parameters: nvme: parameters are not kept in files"));
  EXPECT_THAT(text({.optimizer = "nvme"}, "adamw"), HasSubstr("offload.dir: missing"));
  EXPECT_THAT(text({.optimizer = "cpu", .dir = "/disk"}, "adamw"), HasSubstr("which writes no files"));
  for (const char* name : {"muon", "adafactor"}) EXPECT_THAT(text({.optimizer = "nvme", .dir = "/disk"}, name), HasSubstr(std::string("optimizer.name = ") + name));
}

TEST(Warmup, IsATenthOfTheRunUnlessSet) {
  RunConfig config;
  config.train.steps = 50;
  EXPECT_EQ(warmup_steps(config), 5);
  config.train.steps = 100000;
  EXPECT_EQ(warmup_steps(config), 100);
  config.schedule.warmup = 0;
  EXPECT_EQ(warmup_steps(config), 0);
}

TEST(Accumulation, FollowsFromTheGlobalBatch) {
  struct Case {
    int64_t batch, micro, ranks, per_rank, size, steps;
  };
  for (const auto& c : {Case{12, 0, 1, 12, 12, 1},
                        {12, 0, 4, 3, 3, 1},
                        {12, 2, 4, 3, 2, 2},
                        {12, 1, 3, 4, 1, 4},
                        {12, 8, 3, 4, 4, 1}}) {
    RunConfig config;
    config.train.global_batch = c.batch;
    config.train.micro_batch = c.micro;
    Findings findings;
    const Accumulation result = accumulation(config, c.ranks, findings);
    EXPECT_TRUE(findings.empty());
    EXPECT_EQ(result.per_rank, c.per_rank);
    EXPECT_EQ(result.micro_batch, c.size);
    EXPECT_EQ(result.steps, c.steps);
  }
}

TEST(Accumulation, NamesTheNearestLegalBatches) {
  RunConfig config;
  config.train.global_batch = 32;
  Findings findings;
  accumulation(config, 3, findings);
  EXPECT_EQ(findings.items().at(0).remedy, "nearest: 30 and 33");
  config.train.global_batch = 2;
  accumulation(config, 3, findings);
  EXPECT_EQ(findings.items().at(1).remedy, "nearest: 3");
  config.layout.dp = 2;
  accumulation(config, 3, findings);
  EXPECT_THAT(findings.items().at(2).what, HasSubstr("2 data-parallel ranks, but the program runs on 3"));
}

TEST(ReshardGroup, DividesTheRanksOfAReplica) {
  RunConfig config;
  config.train.global_batch = 12;
  config.parallel.zero = 3;
  config.parallel.dp_shard = 6;
  config.parallel.reshard_group = 3;
  Findings findings;
  accumulation(config, 12, findings);
  EXPECT_TRUE(findings.empty());
  config.parallel.reshard_group = 6;
  accumulation(config, 12, findings);
  EXPECT_EQ(findings.items().at(0).remedy, "legal values: 2, 3, or 0");
  config.parallel.dp_shard = 2;
  accumulation(config, 12, findings);
  EXPECT_EQ(findings.items().at(1).remedy, "legal value: 0");
  config.parallel.zero = 2;
  config.data.train = "x";
  Findings between;
  check(config, between);
  EXPECT_THAT(between.text(), HasSubstr("parallel.reshard_group: 6 without parallel.zero = 3"));
}

TEST(Replicas, DivideTheRanks) {
  RunConfig config;
  config.train.global_batch = 12;
  config.parallel.zero = 3;
  config.parallel.dp_shard = 2;
  Findings findings;
  accumulation(config, 6, findings);
  EXPECT_TRUE(findings.empty());
  config.parallel.dp_shard = 4;
  accumulation(config, 6, findings);
  EXPECT_EQ(findings.items().at(0).what, "6 ranks do not divide into replicas of 4");
  EXPECT_EQ(findings.items().at(0).remedy, "legal values: 1, 2, 3, 6, or 0 for all");
  config.parallel.zero = 0;
  config.data.train = "x";
  Findings between;
  check(config, between);
  EXPECT_THAT(between.text(), HasSubstr("parallel.dp_shard: 4 with parallel.zero = 0"));
}

TEST(Activations, AreRecomputedOrOffloadedNotBoth) {
  RunConfig config;
  config.data.train = "train.bin";
  config.train.recompute = "half";
  Findings one;
  check(config, one);
  EXPECT_TRUE(one.empty()) << one.text();
  config.train.offload_activations = true;
  Findings both;
  check(config, both);
  EXPECT_THAT(both.text(), HasSubstr("train.offload_activations: true with train.recompute = half"));
}

}  // namespace
}  // namespace weft::config
