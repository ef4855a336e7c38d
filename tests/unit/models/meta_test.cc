// The same model on the meta device has the bytes of the real one: at the peak, by category, and what stays.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "weft/cost/memory.h"
#include "weft/memory/cpu_allocator.h"
#include "weft/model/presets.h"
#include "weft/models/transformer.h"
#include "weft/nn/activations.h"

namespace weft::models {
namespace {

using memory::Category;
using memory::Space;
using memory::Usage;

/// Two forward and backward passes; peaks are those of the second.
Usage two_passes(const model::ModelSpec& spec, at::ScalarType dtype, const at::Device& device, int64_t batch, int64_t seq,
                 Recompute recompute = Recompute::none) {
  const Space space = device.is_meta() ? Space::meta : Space::cpu;
  const memory::Scope parameters(Category::parameters);
  Transformer model(spec, TransformerOptions{.dtype = dtype, .device = device});
  set_recompute(model, {.mode = recompute, .units = "layers.*"});
  const memory::Scope activations(Category::activations);
  const at::Tensor tokens = torch::zeros({batch, seq}, torch::TensorOptions(torch::kLong).device(device));
  for (int i = 0; i < 2; ++i) {
    memory::reset_peak(space);
    model->loss_sum(tokens, tokens).sum.backward();
  }
  return memory::usage(space);
}

/// oneDNN, which multiplies 16-bit matrices, packs operands into blocks of sizes of its own; freed with the call.
constexpr int64_t kPackedOperands = 128 << 10;

TEST(Meta, HasTheBytesOfTheRealModel) {
  install_cpu_allocator();
  memory::install_meta_counter();
  at::set_num_threads(2);
  for (const char* name : {"llama-tiny", "llama-tiny-tied", "gpt2-tiny"}) {
    for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kBFloat16}) {
      for (const auto& [batch, seq] : {std::pair<int64_t, int64_t>{2, 64}}) {
        const model::ModelSpec spec = model::preset(name);
        const Usage before = memory::usage();
        const Usage real = two_passes(spec, dtype, torch::kCPU, batch, std::min(seq, spec.context));
        const Usage meta = two_passes(spec, dtype, torch::kMeta, batch, std::min(seq, spec.context));
        SCOPED_TRACE(std::string(name) + " " + c10::toString(dtype) + " " + std::to_string(batch) + "x" + std::to_string(seq));
        if (dtype == torch::kBFloat16) {
          EXPECT_GE(real.peak - before.live, meta.peak);
          EXPECT_LE(real.peak - before.live, meta.peak + kPackedOperands);
          continue;
        }
        EXPECT_EQ(real.peak - before.live, meta.peak);
        EXPECT_EQ(real.live - before.live, meta.live);
        for (size_t i = 0; i < memory::kCategories; ++i) {
          EXPECT_EQ(real.at_peak[i] - before.live_of[i], meta.at_peak[i]) << memory::name_of(static_cast<Category>(i));
        }
        EXPECT_GT(meta.at_peak[static_cast<size_t>(Category::activations)], batch * seq * spec.hidden * 4);
      }
    }
  }
}

TEST(Meta, HasTheBytesOfTheRealModelUnderRecompute) {
  install_cpu_allocator();
  memory::install_meta_counter();
  for (const auto recompute : {Recompute::attention, Recompute::keep_matmuls, Recompute::half, Recompute::keep_attention, Recompute::full}) {
    for (const char* name : {"llama-tiny", "gpt2-tiny"}) {
      SCOPED_TRACE(std::string(name) + " " + recompute_name(recompute));
      const model::ModelSpec spec = model::preset(name);
      const Usage before = memory::usage();
      const Usage real = two_passes(spec, torch::kFloat, torch::kCPU, 2, 64, recompute);
      const Usage meta = two_passes(spec, torch::kFloat, torch::kMeta, 2, 64, recompute);
      EXPECT_EQ(real.peak - before.live, meta.peak);
      EXPECT_EQ(real.live - before.live, meta.live);
    }
  }
}

/// Bytes that one more block keeps between forward and backward.
int64_t kept_by_a_block(const char* preset, Recompute recompute, int64_t batch, int64_t seq) {
  std::vector<int64_t> kept;
  for (const size_t layers : {2, 3}) {
    model::ModelSpec spec = model::preset(preset);
    spec.blocks.resize(layers, spec.blocks.front());
    Transformer model(spec, TransformerOptions{.device = torch::kMeta});
    set_recompute(model, {.mode = recompute, .units = "layers.*"});
    const at::Tensor tokens = torch::zeros({batch, seq}, torch::TensorOptions(torch::kLong).device(torch::kMeta));
    const int64_t before = memory::usage(Space::meta).live;
    const at::Tensor hidden = model->forward(tokens);
    kept.push_back(memory::usage(Space::meta).live - before);
  }
  return kept[1] - kept[0];
}

// What docs/recompute.md promises, to the byte, in closed form, and as the planner counts it (in 16 bits).
TEST(Meta, RecomputeKeepsWhatItsModeSays) {
  memory::install_meta_counter();
  constexpr int64_t kBatch = 2, kSeq = 64, kTokens = kBatch * kSeq;
  const model::ModelSpec spec = model::preset("llama-tiny");
  const model::BlockSpec& block = spec.blocks[0];
  const int64_t hidden = spec.hidden, ffn = block.mlp.ffn, heads = block.attention.heads, head = block.attention.head_dim;
  const int64_t query = heads * head, keys = block.attention.kv_heads * head;
  const int64_t core = 4 * kTokens * (2 * query + 2 * keys) + 4 * kTokens * heads;  // q, k, v, result; a logarithm per row
  const auto kept = [&](Recompute mode) { return kept_by_a_block("llama-tiny", mode, kBatch, kSeq); };
  EXPECT_EQ(kept(Recompute::full), 4 * kTokens * hidden);
  const int64_t result = 4 * kTokens * query + 4 * kTokens * heads;
  EXPECT_EQ(kept(Recompute::keep_attention), 4 * kTokens * hidden + result);
  EXPECT_EQ(kept(Recompute::half), 4 * kTokens * hidden + result + 4 * kTokens * (query + keys + ffn + hidden));
  EXPECT_EQ(kept(Recompute::keep_matmuls), 4 * kTokens * hidden + result + 4 * kTokens * (query + 2 * keys + 2 * ffn + 2 * hidden));
  EXPECT_EQ(kept(Recompute::attention), kept(Recompute::none)) << "the kernel keeps no scores";
  EXPECT_GT(kept(Recompute::none), 4 * kTokens * (4 * hidden + 3 * ffn) + core);
  // The planner's formulas are for 16-bit elements and a 32-bit logarithm per row.
  cost::ActivationShape shape;
  shape.tokens = static_cast<double>(kTokens);
  shape.sequence = static_cast<double>(kSeq);
  const cost::BlockBytes bytes = cost::block_bytes(block, static_cast<double>(hidden), false, shape, {});
  const auto planned = [&](layout::Recompute mode) {
    const double rows = 4.0 * static_cast<double>(kTokens * heads);
    const double all = cost::kept_bytes(block, bytes, static_cast<double>(hidden), shape, mode, true);
    return mode == layout::Recompute::full ? 2 * all : 2 * (all - rows) + rows;
  };
  EXPECT_EQ(static_cast<double>(kept(Recompute::full)), planned(layout::Recompute::full));
  EXPECT_EQ(static_cast<double>(kept(Recompute::half)), planned(layout::Recompute::half));
  EXPECT_NEAR(static_cast<double>(kept(Recompute::none)), planned(layout::Recompute::none), 0.02 * planned(layout::Recompute::none));
}

}  // namespace
}  // namespace weft::models
