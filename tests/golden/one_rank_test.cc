// One rank, all axes 1: the model must be plain libtorch, bit for bit, while libtorch's kernels are chosen, and equal
// within rounding with the fused ones.
#include <gtest/gtest.h>
#include <torch/types.h>

#include "tests/reference/gpt2.h"
#include "tests/reference/llama.h"
#include "weft/model/presets.h"
#include "weft/models/transformer.h"

namespace weft {
namespace {

constexpr int64_t kRows = 3, kTokens = 16;
constexpr double kFused64 = 1e-12;  // relative; a few hundred roundings of 1e-16
constexpr double kFused32 = 1e-6;
/// A gradient that is zero but for rounding (the bias of the keys) is measured against this share of the largest one.
constexpr double kFloor = 1e-3;

template <class Reference>
void copy_weights(const models::Transformer& from, Reference& to) {
  torch::NoGradGuard no_grad;
  const auto source = from->named_parameters();
  ASSERT_EQ(source.size(), to->named_parameters().size());
  for (auto& p : to->named_parameters()) {
    ASSERT_TRUE(source.contains(p.key())) << p.key();
    p.value().copy_(source[p.key()]);
  }
}

/// Largest difference over the largest element: max|a - b| / max|b|.
double error_of(const torch::Tensor& a, const torch::Tensor& b, double floor) {
  return (a - b).abs().max().item<double>() / std::max(b.abs().max().item<double>(), floor);
}

struct RandomBatch {
  torch::Tensor tokens, targets;
};

RandomBatch make_batch(int64_t vocab) {
  torch::manual_seed(7);
  return {torch::randint(vocab, {kRows, kTokens}), torch::randint(vocab, {kRows, kTokens})};
}

template <class Reference>
void expect_same(const model::ModelSpec& spec, Reference reference, torch::Dtype dtype, nn::Kernels kernels, double tolerance) {
  reference->to(dtype);
  models::Transformer ours(spec, models::TransformerOptions{.dtype = dtype, .seed = 5, .kernels = kernels});
  copy_weights(ours, reference);
  const RandomBatch batch = make_batch(spec.vocab);

  const auto logits = ours->logits(batch.tokens), expected_logits = reference(batch.tokens);
  const auto [loss, valid] = ours->loss_sum(batch.tokens, batch.targets);
  const auto expected_loss = reference::loss_sum(expected_logits, batch.targets);
  EXPECT_EQ(valid, kRows * kTokens);
  (loss / valid).backward();
  (expected_loss / valid).backward();

  const auto expect_close = [&](const torch::Tensor& a, const torch::Tensor& b, const std::string& what, double floor) {
    if (tolerance == 0) {
      EXPECT_TRUE(torch::equal(a, b)) << what;
    } else {
      EXPECT_LE(error_of(a, b, floor), tolerance) << what;
    }
  };
  expect_close(logits, expected_logits, "logits", 0);
  expect_close(loss.detach(), expected_loss.detach(), "loss", 0);
  EXPECT_GT(loss.item<double>(), 1.0);
  double largest = 0;
  for (const auto& p : reference->named_parameters()) largest = std::max(largest, p.value().grad().abs().max().template item<double>());
  EXPECT_GT(largest, 0.0);
  const auto mine = ours->named_parameters();
  for (const auto& p : reference->named_parameters()) {
    const auto grad = mine[p.key()].grad(), expected = p.value().grad();
    ASSERT_TRUE(grad.defined()) << p.key();
    expect_close(grad, expected, p.key(), kFloor * largest);
    EXPECT_GT(expected.abs().max().template item<double>(), 0.0) << p.key();
  }
}

model::ModelSpec llama_spec(const reference::LlamaSizes& s) {
  model::ModelSpec spec = model::preset(s.tied ? "llama-tiny-tied" : "llama-tiny");
  spec.context = s.context;
  spec.rope.theta = s.theta;
  for (model::BlockSpec& block : spec.blocks) {
    block.attention.qkv_bias = s.qkv_bias;
    block.attention.qk_norm = s.qk_norm;
  }
  return spec;
}

const std::vector<reference::LlamaSizes> kLlamas = {{}, {.tied = true}, {.qkv_bias = true}, {.qk_norm = true, .theta = 500000.0}};

TEST(OneRank, LlamaWithTorchKernelsIsBitEqual) {
  for (const auto& sizes : kLlamas)
    for (const auto dtype : {torch::kFloat, torch::kDouble})
      expect_same(llama_spec(sizes), reference::Llama(sizes), dtype, nn::Kernels::torch, 0);
}

TEST(OneRank, LlamaWithFusedKernelsAgrees) {
  for (const auto& sizes : kLlamas) {
    expect_same(llama_spec(sizes), reference::Llama(sizes), torch::kDouble, nn::Kernels::fused, kFused64);
    expect_same(llama_spec(sizes), reference::Llama(sizes), torch::kFloat, nn::Kernels::fused, kFused32);
  }
}

model::ModelSpec gpt2_spec() {
  model::ModelSpec spec = model::preset("gpt2-tiny");
  spec.context = kTokens;
  spec.dropout = 0;
  return spec;
}

TEST(OneRank, Gpt2WithTorchKernelsIsBitEqual) {
  for (const auto dtype : {torch::kFloat, torch::kDouble})
    expect_same(gpt2_spec(), reference::Gpt2(reference::Gpt2Sizes{}), dtype, nn::Kernels::torch, 0);
}

TEST(OneRank, Gpt2WithFusedKernelsAgrees) {
  expect_same(gpt2_spec(), reference::Gpt2(reference::Gpt2Sizes{}), torch::kDouble, nn::Kernels::fused, kFused64);
  expect_same(gpt2_spec(), reference::Gpt2(reference::Gpt2Sizes{}), torch::kFloat, nn::Kernels::fused, kFused32);
}

}  // namespace
}  // namespace weft
