// Losses of PyTorch's own training loop from the same weights and tokens (tests/data/golden_llama.json says how they came).
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/tolerances.h"
#include "weft/checkpoint/safetensors.h"
#include "weft/models/transformer.h"

namespace weft {
namespace {

/// The losses are given to 15 digits; 16 updates amplify rounding differences a little.

model::ModelSpec golden_spec(const nlohmann::json& golden) {
  model::ModelSpec spec;
  spec.name = "golden";
  spec.family = "llama";
  spec.hidden = golden["hidden"];
  spec.vocab = golden["vocab"];
  spec.context = golden["sequence"];
  model::BlockSpec block;
  block.attention.heads = golden["heads"];
  block.attention.kv_heads = golden["kv_heads"];
  block.attention.head_dim = spec.hidden / block.attention.heads;
  block.mlp.ffn = golden["ffn"];
  spec.blocks.assign(golden["layers"].get<size_t>(), block);
  return spec;
}

struct Batch {
  torch::Tensor tokens, targets;
};

Batch batch_of(const nlohmann::json& golden, const torch::Tensor& tokens, int64_t step) {
  const int64_t rows = golden["rows"], sequence = golden["sequence"];
  std::vector<torch::Tensor> inputs, targets;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = (step * rows + row) * sequence % (tokens.size(0) - sequence - 1);
    inputs.push_back(tokens.narrow(0, at, sequence));
    targets.push_back(tokens.narrow(0, at + 1, sequence));
  }
  return {torch::stack(inputs), torch::stack(targets)};
}

void expect_golden_losses(nn::Kernels kernels) {
  const std::string data = WEFT_TEST_DATA;
  const nlohmann::json golden = nlohmann::json::parse(std::ifstream(data + "/golden_llama.json"));
  const checkpoint::SafetensorsFile weights(data + "/golden_llama.safetensors");
  models::Transformer model(golden_spec(golden), models::TransformerOptions{.dtype = torch::kDouble, .kernels = kernels});
  for (auto& p : model->named_parameters()) p.value().detach().copy_(weights.tensor(p.key()));
  ASSERT_EQ(weights.names().size(), model->named_parameters().size());

  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(golden["lr"])
                                                         .betas({golden["beta1"], golden["beta2"]})
                                                         .weight_decay(golden["weight_decay"]));
  const auto tokens = torch::tensor(golden["tokens"].get<std::vector<int64_t>>());
  const auto losses = golden["losses"].get<std::vector<double>>();
  ASSERT_GT(losses.front() - losses.back(), 1.0);
  for (size_t step = 0; step < losses.size(); ++step) {
    const Batch batch = batch_of(golden, tokens, static_cast<int64_t>(step));
    optimizer.zero_grad();
    const auto [sum, valid] = model->loss_sum(batch.tokens, batch.targets);
    const auto loss = sum / valid;
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), golden["max_norm"].get<double>());
    optimizer.step();
    EXPECT_NEAR(loss.item<double>() / losses[step], 1.0, testing::kFp64Parity) << "step " << step;
  }
}

TEST(GoldenLlama, TorchKernelsGivePyTorchsLosses) { expect_golden_losses(nn::Kernels::torch); }
TEST(GoldenLlama, FusedKernelsGivePyTorchsLosses) { expect_golden_losses(nn::Kernels::fused); }

}  // namespace
}  // namespace weft
