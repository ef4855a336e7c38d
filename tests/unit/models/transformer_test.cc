#include "weft/models/transformer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>

#include "weft/core/error.h"
#include "weft/model/presets.h"
#include "weft/models/generate.h"
#include "weft/nn/init.h"

namespace weft::models {
namespace {

TEST(Transformer, WeightsAreAFunctionOfSeedNameAndIndex) {
  const model::ModelSpec spec = model::preset("llama-tiny");
  const Transformer a(spec, TransformerOptions{.dtype = torch::kDouble, .seed = 3}), narrow(spec, TransformerOptions{.dtype = torch::kFloat, .seed = 3}),
      half(spec, TransformerOptions{.dtype = torch::kBFloat16, .seed = 3}), other(spec, TransformerOptions{.dtype = torch::kDouble, .seed = 4});
  for (const model::Param& p : model::parameter_table(spec)) {
    const auto whole = a->named_parameters()[p.name].detach();
    const auto single = narrow->named_parameters()[p.name].detach();
    EXPECT_TRUE(torch::equal(whole.to(torch::kFloat), single)) << p.name;
    EXPECT_TRUE(torch::equal(single.to(torch::kBFloat16), half->named_parameters()[p.name])) << p.name;
    if (p.init.kind != model::InitRule::Kind::normal) continue;
    EXPECT_FALSE(torch::equal(whole, other->named_parameters()[p.name])) << p.name;
    EXPECT_NEAR(whole.std().item<double>() / p.init.std, 1.0, 0.2) << p.name;
    const int64_t begin = 5, count = whole.numel() / 2;  // any slice by itself
    auto slice = torch::empty({count}, torch::kDouble);
    nn::init_parameter(p.name, p.init, 3, begin, slice);
    EXPECT_TRUE(torch::equal(slice, whole.flatten().narrow(0, begin, count))) << p.name;
  }
}

TEST(Transformer, BuildsEveryVariantOfTheSpecThatItAccepts) {
  for (const char* name : {"gpt2-tiny", "llama-tiny", "llama-tiny-tied"}) {
    for (const int variant : {0, 1, 2, 3}) {
      model::ModelSpec spec = model::preset(name);
      spec.embedding_norm = variant == 1;
      spec.logit_softcap = variant == 2 ? 30 : 0;
      for (model::BlockSpec& block : spec.blocks) {
        block.parallel_residual = variant == 1;
        block.norms = variant == 1 ? 1 : variant == 2 ? 4 : 2;
        block.attention.softcap = variant == 2 ? 50 : 0;
        block.attention.window = variant == 3 ? 3 : 0;
      }
      Transformer model(spec, TransformerOptions{.seed = 1});
      const auto tokens = torch::arange(20).reshape({2, 10});
      const auto [sum, valid] = model->loss_sum(tokens, tokens);
      sum.backward();
      EXPECT_NEAR(sum.item<double>() / static_cast<double>(valid), std::log(spec.vocab), 1.0) << name << variant;
      for (const auto& p : model->named_parameters()) EXPECT_TRUE(p.value().grad().defined()) << name << variant << p.key();
    }
  }
}

TEST(Transformer, SaysAllThatItCannotBuild) {
  model::ModelSpec spec = model::preset("llama-tiny");
  spec.position = model::PositionKind::alibi;
  spec.blocks[1].moe = model::MoeSpec{};
  spec.blocks[0].attention.kv_heads = 3;
  try {
    const Transformer model(spec);
    FAIL() << "accepted";
  } catch (const ConfigError& e) {
    EXPECT_THAT(e.what(), ::testing::AllOf(::testing::HasSubstr("ALiBi"), ::testing::HasSubstr("layers.1.moe"),
                                           ::testing::HasSubstr("multiple of kv_heads")));
  }
  Transformer model(model::preset("llama-tiny"));
  EXPECT_THROW(model->forward(torch::zeros({1, model->spec().context + 1}, torch::kLong)), ConfigError);
}

/// Tables that the first forward makes are used by later ones, whatever mode that was in.
TEST(Transformer, TrainsAfterAFirstForwardUnderInferenceMode) {
  const auto tokens = torch::arange(20).reshape({2, 10});
  const auto gradient = [&](bool inference_first) {
    Transformer model(model::preset("llama-tiny"), TransformerOptions{.seed = 1});
    if (inference_first) {
      const c10::InferenceMode inference;
      EXPECT_TRUE(model->logits(tokens).is_inference());
    }
    model->loss_sum(tokens, tokens).sum.backward();
    return model->layers[0]->parameters()[0].grad();
  };
  EXPECT_TRUE(torch::equal(gradient(true), gradient(false)));
}

TEST(Transformer, DropoutDependsOnTheGlobalPositionAlone) {
  model::ModelSpec spec = model::preset("gpt2-tiny");
  spec.dropout = 0.3;
  Transformer model(spec, TransformerOptions{.dtype = torch::kDouble, .seed = 2});
  const auto tokens = torch::arange(40).reshape({4, 10});
  const auto whole = model->forward(tokens, {.step = 5});
  const auto rest = model->forward(tokens.narrow(0, 2, 2), {.step = 5, .first_sample = 2});
  const auto odd = model->forward(torch::stack({tokens[1], tokens[3]}), {.step = 5, .first_sample = 1, .sample_stride = 2});
  EXPECT_TRUE(torch::allclose(whole.narrow(0, 2, 2), rest, 1e-12, 1e-12));
  EXPECT_TRUE(torch::allclose(whole[3], odd[1], 1e-12, 1e-12));
  EXPECT_FALSE(torch::allclose(whole, model->forward(tokens, {.step = 6})));
  model->eval();
  EXPECT_TRUE(torch::equal(model->forward(tokens, {.step = 5}), model->forward(tokens, {.step = 6})));
  // A sparse gradient mask: dropped elements get none, the others are scaled.
  const nn::Dropout dropout(0.3, 1, "x", 8);
  const auto x = torch::ones({2, 8, 500}, torch::dtype(torch::kDouble).requires_grad(true));
  const auto y = dropout(x, {.step = 1});
  y.sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), y.detach()));
  EXPECT_NEAR(y.mean().item<double>(), 1.0, 0.03);
}

TEST(Generate, CachedStepsEqualReadingTheWholeTextAgain) {
  for (const char* name : {"gpt2-tiny", "llama-tiny"}) {
    Transformer model(model::preset(name), TransformerOptions{.dtype = torch::kDouble, .seed = 6});
    {
      torch::NoGradGuard no_grad;
      for (auto& p : model->parameters()) p.mul_(5);  // makes the choice less uniform
    }
    std::vector<int64_t> text = {3, 1, 4};
    const auto greedy = generate(model, text, 20, {.temperature = 0});
    for (const int64_t token : greedy) {
      torch::NoGradGuard no_grad;
      model->eval();
      const auto logits = model->logits(torch::tensor(text).unsqueeze(0));
      EXPECT_EQ(token, logits[0][-1].argmax().item<int64_t>()) << name;
      text.push_back(token);
    }
    const GenerateOptions draw{.temperature = 0.8, .top_k = 10, .seed = 9};
    EXPECT_EQ(generate(model, {1, 2}, 100, draw), generate(model, {1, 2}, 100, draw));  // past the context of 64
    EXPECT_NE(generate(model, {1, 2}, 30, draw), generate(model, {1, 2}, 30, {.temperature = 0.8, .top_k = 10, .seed = 10}));
    EXPECT_THROW(generate(model, {}, 1), ConfigError);
    EXPECT_THROW(generate(model, {1000}, 1), ConfigError);
  }
}

}  // namespace
}  // namespace weft::models
