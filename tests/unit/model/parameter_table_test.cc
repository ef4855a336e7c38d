// Exact parameter counts against published totals, and the contract of the table (names, order, tp_dim, init).
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "weft/core/error.h"
#include "weft/model/presets.h"

namespace weft::model {
namespace {

struct Total {
  const char* name;
  int64_t count;
};

// Totals of the published checkpoints (sum over the safetensors headers / model cards), tied weights counted once.
constexpr Total kTotals[] = {
    {"gpt2", 124439808},          {"gpt2-medium", 354823168},     {"gpt2-large", 774030080},     {"gpt2-xl", 1557611200},
    {"llama2-7b", 6738415616},    {"llama2-13b", 13015864320},    {"llama2-70b", 68976648192},   {"tinyllama-1.1b", 1100048384},
    {"llama3-8b", 8030261248},    {"llama3-70b", 70553706496},    {"llama3.1-405b", 405853388800}, {"llama3.2-1b", 1235814400},
    {"llama3.2-3b", 3212749824},  {"qwen2.5-0.5b", 494032768},    {"qwen2.5-7b", 7615616512},    {"qwen3-0.6b", 596049920},
    {"qwen3-8b", 8190735360},     {"mistral-7b", 7241732096},     {"gemma-2b", 2506172416},      {"gemma-7b", 8537680896},
    {"gemma2-2b", 2614341888},    {"gemma2-9b", 9241705984},      {"gemma2-27b", 27227128320},   {"pythia-6.9b", 6857302016},
    {"mixtral-8x7b", 46702792704}, {"qwen3-30b-a3b", 30532122624}, {"qwen3-235b-a22b", 235093634560}, {"deepseek-v3", 671026419200},
    {"deepseek-v2", 235741434880}, {"deepseek-v2-lite", 15706484224}, {"bloom-176b", 176247271424}, {"phi3-mini", 3821079552},      {"opt-125m", 125239296},       {"falcon-7b", 6921720704},
};

TEST(ParameterTable, CountsArePublishedTotals) {
  for (const Total& total : kTotals) EXPECT_EQ(parameter_count(preset(total.name)), total.count) << total.name;
}

TEST(ParameterTable, LlamaNamesOrderAndSharding) {
  const ModelSpec spec = preset("llama-tiny");
  const std::vector<Param> table = parameter_table(spec);
  std::vector<std::string> names;
  for (const Param& param : table) names.push_back(param.name);
  const std::vector<std::string> first = {"tok.weight",
                                          "layers.0.norm1.weight",
                                          "layers.0.attn.wq.weight",
                                          "layers.0.attn.wk.weight",
                                          "layers.0.attn.wv.weight",
                                          "layers.0.attn.wo.weight",
                                          "layers.0.norm2.weight",
                                          "layers.0.ffn.w1.weight",
                                          "layers.0.ffn.w3.weight",
                                          "layers.0.ffn.w2.weight"};
  ASSERT_EQ(names.size(), 1 + 2 * 9 + 2u);
  EXPECT_TRUE(std::equal(first.begin(), first.end(), names.begin()));
  EXPECT_EQ(names[names.size() - 2], "norm.weight");
  EXPECT_EQ(names.back(), "head.weight");
  EXPECT_EQ(table[3].shape, (std::vector<int64_t>{16, 32}));  // 2 of 4 heads of size 8
  EXPECT_EQ(table[2].tp_dim, 0);
  EXPECT_EQ(table[5].tp_dim, 1);
  EXPECT_EQ(table[9].tp_dim, 1);
  EXPECT_EQ(table[6].tp_dim, -1);
  EXPECT_EQ(table[2].layer, 0);
  EXPECT_EQ(table[0].layer, -1);
}

TEST(ParameterTable, InitScalesResidualOutputs) {
  const ModelSpec spec = preset("gpt2");
  for (const Param& param : parameter_table(spec)) {
    const bool output = param.name.ends_with("wo.weight") || param.name.ends_with("w2.weight");
    if (param.kind == ParamKind::bias) {
      EXPECT_EQ(param.init.kind, InitRule::Kind::zeros) << param.name;
    } else if (param.kind == ParamKind::norm) {
      EXPECT_EQ(param.init.kind, param.name.ends_with(".bias") ? InitRule::Kind::zeros : InitRule::Kind::ones) << param.name;
    } else {
      EXPECT_DOUBLE_EQ(param.init.std, output ? 0.02 / std::sqrt(24.0) : 0.02) << param.name;
    }
  }
}

TEST(ParameterTable, NamesAreUniqueAndTiedHeadHasNoEntry) {
  for (const std::string& name : preset_names()) {
    const ModelSpec spec = preset(name);
    std::set<std::string> seen;
    for (const Param& param : parameter_table(spec)) {
      EXPECT_TRUE(seen.insert(param.name).second) << name << " " << param.name;
      EXPECT_GT(param.numel(), 0) << name << " " << param.name;
    }
    EXPECT_EQ(seen.count("head.weight"), spec.tied_head ? 0u : 1u) << name;
  }
}

TEST(Presets, UnknownNameNamesTheNearest) {
  try {
    preset("llama3-8");
    FAIL() << "no error";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("llama3-8b"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace weft::model
