// config.json files of twelve families, both spellings: totals against the library's own checkpoints; errors as findings.
#include <gtest/gtest.h>

#include "weft/core/error.h"
#include "weft/model/hf_config.h"

namespace weft::model {
namespace {

struct Tiny {
  const char* name;
  int64_t parameters;
};
constexpr Tiny kTiny[] = {{"llama", 31904},   {"llama_rope3", 31904}, {"deepseek_v3", 34128}, {"gemma2", 23072}, {"gemma3", 23104}, {"gpt2", 36480},
                          {"gpt_neox", 35072}, {"mixtral", 36768},     {"phi3", 31904},        {"qwen3", 29152},  {"mistral", 31904}, {"qwen2", 32032}};

std::string file(const std::string& name) { return std::string(WEFT_TEST_DATA) + "/hf_configs/" + name + ".json"; }

TEST(HfConfig, TotalsEqualTheLibrarysCheckpoints) {
  // The tiny qwen3 config ties its head in one spelling of the sample; its checkpoint stores both.
  for (const Tiny& tiny : kTiny)
    for (const char* version : {".v4", ".v5"}) {
      const ModelSpec spec = read_hf_config(file(std::string(tiny.name) + version));
      EXPECT_EQ(parameter_count(spec), tiny.parameters) << tiny.name << version;
    }
}

TEST(HfConfig, BothSpellingsGiveTheSameRope) {
  for (const Tiny& tiny : kTiny) {
    const ModelSpec old = read_hf_config(file(std::string(tiny.name) + ".v4")), now = read_hf_config(file(std::string(tiny.name) + ".v5"));
    EXPECT_EQ(old.rope.theta, now.rope.theta) << tiny.name;
    EXPECT_EQ(old.rope.fraction, now.rope.fraction) << tiny.name;
    EXPECT_EQ(old.rope.scaling, now.rope.scaling) << tiny.name;
    EXPECT_EQ(old.rope.factor, now.rope.factor) << tiny.name;
    EXPECT_EQ(old.rope.original_context, now.rope.original_context) << tiny.name;
    EXPECT_EQ(old.rope.local_theta, now.rope.local_theta) << tiny.name;
  }
  EXPECT_EQ(read_hf_config(file("llama_rope3.v4")).rope.scaling, "llama3");
  EXPECT_EQ(read_hf_config(file("gemma3.v5")).rope.local_theta, 10000.0);
}

TEST(HfConfig, WindowsFollowLayerTypes) {
  const ModelSpec gemma = read_hf_config(file("gemma2.v5"));
  EXPECT_EQ(gemma.blocks[0].attention.window, 4);
  EXPECT_EQ(gemma.blocks[1].attention.window, 0);
  EXPECT_DOUBLE_EQ(gemma.blocks[0].attention.scale, 0.25);
  EXPECT_EQ(gemma.blocks[0].norms, 4);
  EXPECT_EQ(read_hf_config(file("mistral.v4")).blocks[1].attention.window, 4);
  EXPECT_EQ(read_hf_config(file("qwen3.v5")).blocks[0].attention.window, 0);
}

std::string error_of(const Json& config) {
  try {
    spec_from_hf(config, "config.json");
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(HfConfig, MissingUnknownAndUnsupportedAreFindingsAtOnce) {
  Json config = read_json(file("llama.v5"));
  config.erase("hidden_size");
  config["use_qk_norm"] = true;
  config["hidden_act"] = "mish";
  const std::string error = error_of(config);
  EXPECT_NE(error.find("hidden_size: is missing"), std::string::npos) << error;
  EXPECT_NE(error.find("use_qk_norm: is not a key"), std::string::npos) << error;
  EXPECT_NE(error.find("\"mish\""), std::string::npos) << error;
}

TEST(HfConfig, WrongTypeAndUnknownFamily) {
  Json config = read_json(file("llama.v5"));
  config["num_hidden_layers"] = "two";
  EXPECT_NE(error_of(config).find("wrong type"), std::string::npos);
  config = read_json(file("llama.v5"));
  config["model_type"] = "lama";
  EXPECT_NE(error_of(config).find("llama"), std::string::npos) << error_of(config);
  EXPECT_NE(error_of(Json::array()).find("not a JSON object"), std::string::npos);
}

}  // namespace
}  // namespace weft::model
