#include "weft/config/parse.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>

#include "tests/support/temp_dir.h"
#include "weft/config/check.h"
#include "weft/config/fields.h"

namespace weft::config {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::weft::testing::TempDir;

std::vector<std::string> lines(const Findings& findings) {
  std::vector<std::string> out;
  for (const Finding& f : findings.items())
    out.push_back(f.where + ": " + f.what + (f.remedy.empty() ? "" : " (" + f.remedy + ")"));
  return out;
}

std::vector<std::string> problems(const std::string& text) {
  Findings findings;
  parse(text, "run.toml", findings);
  return lines(findings);
}

TEST(Parse, ReadsValuesOverDefaults) {
  Findings findings;
  const RunConfig config = parse(
      "[data]\ntrain = 'a b.bin'\n[train]\nsteps = 7\n[optimizer]\nlr = 1\n[run]\noverwrite = true\n", "x", findings);
  EXPECT_TRUE(findings.empty()) << findings.text();
  EXPECT_EQ(config.data.train, "a b.bin");
  EXPECT_EQ(config.train.steps, 7);
  EXPECT_EQ(config.optimizer.lr, 1.0);
  EXPECT_TRUE(config.run.overwrite);
  EXPECT_EQ(config.train.seed, RunConfig().train.seed);
}

TEST(Parse, ReportsEveryProblemAtOnceWithItsLine) {
  EXPECT_THAT(
      problems(
          "[train]\nstepz = 5\nsteps = \"many\"\nglobal_batch = 0\ndtype = 'fp8'\nseed = 1.5\n[optimzer]\nlr = 1\n"),
      ElementsAre("run.toml:2 train.stepz: unknown key (did you mean train.steps?)",
                  "run.toml:3 train.steps: 'many' is no whole number",
                  "run.toml:4 train.global_batch: 0 is out of range (at least 1, at most 1000000000)",
                  "run.toml:5 train.dtype: \"fp8\" is none of fp64, fp32, bf16, fp16",
                  "run.toml:6 train.seed: 1.5 is no whole number",
                  "run.toml:7 [optimzer]: unknown section (did you mean [optimizer]?)"));
}

TEST(Parse, UnknownKeysNameTheNearestKnownOne) {
  EXPECT_THAT(problems("[train]\nlr = 1\n"), ElementsAre(HasSubstr("did you mean optimizer.lr?")));
  EXPECT_THAT(problems("steps = 1\n"), ElementsAre(HasSubstr("did you mean train.steps?")));
  EXPECT_THAT(problems("[model]\nlayer = 1\n"), ElementsAre(HasSubstr("did you mean model.layers?")));
}

TEST(Parse, SyntaxErrorsHaveTheirPlace) {
  EXPECT_THAT(problems("[train]\nsteps = = 1\n"), ElementsAre(::testing::StartsWith("run.toml:2:9: not valid TOML")));
}

TEST(Parse, NumbersMustBeFiniteAndInRange) {
  EXPECT_THAT(problems("[optimizer]\nlr = nan\n"), ElementsAre(HasSubstr("nan is out of range (more than 0, at most 100)")));
  EXPECT_THAT(problems("[optimizer]\nlr = 0\n"), ElementsAre(HasSubstr("0 is out of range")));
  EXPECT_THAT(problems("[optimizer]\nbeta1 = 1.0\n"), ElementsAre(HasSubstr("at least 0, at most")));
  EXPECT_THAT(problems("[data]\nshuffle = 1\n"), ElementsAre(HasSubstr("1 is no true or false")));
}

TEST(Parse, RatesByNameAreRulesAndSlipsAreNamed) {
  Findings findings;
  OptimizerConfig optimizer{.rates = "head.* = 0.5; *.attn.*|*.norm*.*=1e-1;"};
  const auto rules = rate_rules(optimizer, findings);
  ASSERT_EQ(rules.size(), 2U);
  EXPECT_EQ(rules[0].names, "head.*");
  EXPECT_EQ(rules[0].share, 0.5);
  EXPECT_EQ(rules[1].names, "*.attn.*|*.norm*.*");
  EXPECT_EQ(rules[1].share, 0.1);
  EXPECT_TRUE(findings.empty());
  for (const char* wrong : {"head.*", "=0.5", "head.*=much", "head.*=-1", "head.*=0.5x", "head.*=1e9"}) {
    Findings slips;
    optimizer.rates = wrong;
    EXPECT_TRUE(rate_rules(optimizer, slips).empty()) << wrong;
    EXPECT_THAT(lines(slips), ElementsAre(HasSubstr("is not names = share"))) << wrong;
  }
}

TEST(Parse, RulesBetweenKeysOfTheOptimizer) {
  const auto findings_of = [](const std::function<void(RunConfig&)>& change) {
    RunConfig config;
    config.data.train = "x";
    change(config);
    Findings findings;
    check(config, findings);
    return lines(findings);
  };
  EXPECT_THAT(findings_of([](RunConfig& c) { c.optimizer.name = "lion", c.optimizer.moments_dtype = "bf16"; }), ElementsAre(HasSubstr("bf16 with lion")));
  EXPECT_THAT(findings_of([](RunConfig& c) { c.optimizer.beta2 = 0.999, c.optimizer.moments_dtype = "bf16"; }), ElementsAre(HasSubstr("0.999")));
  EXPECT_THAT(findings_of([](RunConfig& c) { c.optimizer.momentum = -0.5; }), ElementsAre(HasSubstr("neither -1 nor at least 0")));
  EXPECT_THAT(findings_of([](RunConfig& c) { c.schedule.decay = c.train.steps + 1; }), ElementsAre(HasSubstr("steps of decay")));
  EXPECT_THAT(findings_of([](RunConfig& c) { c.optimizer.name = "muon", c.optimizer.lr = 3; }), ElementsAre(HasSubstr("3 with muon")));
  EXPECT_THAT(findings_of([](RunConfig& c) { c.optimizer.name = "sgd", c.optimizer.lr = 3; }), ElementsAre());
}

TEST(Parse, AbsurdStepsAreRefusedWithTheRule) {
  EXPECT_THAT(problems("[model]\ninit_std = 2e4\n"), ElementsAre(HasSubstr("20000 is out of range (at least 0, at most 1)")));
  EXPECT_THAT(problems("[optimizer]\nlr = 1e30\n"), ElementsAre(HasSubstr("1e+30 is out of range (more than 0, at most 100)")));
  EXPECT_THAT(problems("[optimizer]\nclip_norm = 1e9\n"), ElementsAre(HasSubstr("out of range (at least 0, at most 1000000)")));
  EXPECT_THAT(problems("[optimizer]\nweight_decay = 1e3\n"), ElementsAre(HasSubstr("out of range (at least 0, at most 10)")));
  EXPECT_THAT(problems("[layout]\ntimeout_s = 1000000000000000000\n"), ElementsAre(HasSubstr("out of range (at least 1, at most")));
  RunConfig config;
  Findings findings;
  config.data.train = "x";
  config.optimizer.lr = 3;
  config.optimizer.clip_norm = 1e-9;
  check(config, findings);
  EXPECT_THAT(lines(findings), ElementsAre(HasSubstr("3 with adamw, which moves every weight by about that"),
                                           HasSubstr("1e-09 would leave nothing of any gradient; at least 1e-06")));
  config.optimizer.name = "sgd";
  config.optimizer.clip_norm = 0;
  Findings none;
  check(config, none);
  EXPECT_TRUE(none.empty()) << none.text();
}

TEST(Override, TextNeedsNoQuotes) {
  RunConfig config;
  Findings findings;
  override_key(config, "train.dtype=bf16", findings);
  override_key(config, "data.train=/tmp/a=b.bin", findings);
  override_key(config, "run.dir=\"quoted\"", findings);
  override_key(config, "optimizer.lr=2e-3", findings);
  override_key(config, "data.shuffle=false", findings);
  EXPECT_TRUE(findings.empty()) << findings.text();
  EXPECT_EQ(config.train.dtype, "bf16");
  EXPECT_EQ(config.data.train, "/tmp/a=b.bin");
  EXPECT_EQ(config.run.dir, "quoted");
  EXPECT_EQ(config.optimizer.lr, 2e-3);
  EXPECT_FALSE(config.data.shuffle);
}

TEST(Override, ProblemsAreFindings) {
  RunConfig config;
  Findings findings;
  for (const char* wrong : {"train.steps", "train.step=1", "train.steps=many", "train.dtype=fp8", "train.steps=-1"})
    override_key(config, wrong, findings);
  EXPECT_THAT(lines(findings), ElementsAre(HasSubstr("no '=' in it"), HasSubstr("did you mean train.steps?"),
                                           HasSubstr("\"many\" is no whole number"), HasSubstr("\"fp8\" is none of"),
                                           HasSubstr("-1 is out of range")));
}

TEST(ToToml, EveryValueReadsBack) {
  RunConfig config;
  config.data.train = "with \"quotes\" and \\";
  config.optimizer.lr = 0.1 + 0.2;
  config.layout.bucket_mb = 3;
  config.data.shuffle = false;
  config.train.seed = 123456789012345;
  for (const bool help : {false, true}) {
    const std::string text = to_toml(config, help);
    Findings findings;
    const RunConfig back = parse(text, "x", findings);
    EXPECT_TRUE(findings.empty()) << findings.text();
    EXPECT_EQ(to_toml(back, help), text);
    EXPECT_EQ(back.optimizer.lr, 0.1 + 0.2);
    EXPECT_EQ(back.data.train, config.data.train);
  }
}

TEST(Fields, EveryKeyIsExplainedAndItsDefaultIsLegal) {
  RunConfig config;
  std::vector<std::string> keys;
  for (const Field& field : fields()) {
    keys.push_back(field.key);
    EXPECT_GT(field.help.size(), 5u) << field.key;
    EXPECT_EQ(field.rule.broken_by(field.slot(config)), "") << field.key;
  }
  auto unique = keys;
  std::sort(unique.begin(), unique.end());
  EXPECT_EQ(std::unique(unique.begin(), unique.end()), unique.end());
  // Two keys that share a slot would make one of them dead.
  std::vector<const void*> slots;
  for (const Field& field : fields())
    slots.push_back(std::visit([](auto* p) { return static_cast<const void*>(p); }, field.slot(config)));
  std::sort(slots.begin(), slots.end());
  EXPECT_EQ(std::unique(slots.begin(), slots.end()), slots.end());
}

TEST(Load, MissingFileAndMissingDataAreErrors) {
  EXPECT_THROW(load("/nowhere/run.toml"), ConfigError);
  const TempDir dir;
  std::ofstream(dir / "run.toml") << "[train]\nsteps = 5\n";
  try {
    load(dir / "run.toml", {"schedule.warmup=9"});
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("data.train: missing"));
    EXPECT_THAT(error.what(), HasSubstr("9 steps of warm-up in a run of train.steps = 5"));
  }
}

}  // namespace
}  // namespace weft::config
