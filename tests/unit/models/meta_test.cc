// The same model on the meta device has the bytes of the real one: at the peak, by category, and what stays.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "weft/memory/cpu_allocator.h"
#include "weft/model/presets.h"
#include "weft/models/transformer.h"

namespace weft::models {
namespace {

using memory::Category;
using memory::Space;
using memory::Usage;

/// Two forward and backward passes; peaks are those of the second.
Usage two_passes(const model::ModelSpec& spec, at::ScalarType dtype, const at::Device& device, int64_t batch, int64_t seq) {
  const Space space = device.is_meta() ? Space::meta : Space::cpu;
  const memory::Scope parameters(Category::parameters);
  Transformer model(spec, TransformerOptions{.dtype = dtype, .device = device});
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

}  // namespace
}  // namespace weft::models
