// A rehearsal on the meta device, alone, holds what each rank of the real run holds.
#include <gtest/gtest.h>

#include <ATen/Parallel.h>

#include <cstdlib>
#include <functional>

#include "tests/ranks/memory/formulas.h"
#include "tests/ranks/memory/trainer_usage.h"
#include "weft/nn/attention.h"
#include "weft/train/rehearse.h"

namespace weft {
namespace {

config::RunConfig configuration() {
  config::RunConfig c;
  c.model.layers = 3;
  c.model.hidden = 48;
  c.model.heads = 3;
  c.model.kv_heads = 1;
  c.model.vocab = 300;
  c.data.seq = 40;
  c.train.global_batch = 12;
  c.train.micro_batch = 2;
  return c;
}

struct Cell {
  const char* name;
  int ranks;
  std::function<void(config::RunConfig&)> change;
};

class Rehearsal : public ::testing::TestWithParam<Cell> {};

TEST_P(Rehearsal, HoldsWhatTheRealRunHolds) {
  config::RunConfig config = configuration();
  GetParam().change(config);
  const testing::TrainerRun run(config);
  const int ranks = GetParam().ranks;
  const std::vector<memory::Usage> usages = run.usage(ranks);
  for (int rank = 0; rank < ranks && !usages.empty(); ++rank) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    const memory::Usage& real = usages[static_cast<size_t>(rank)];
    const memory::Usage rehearsed = train::rehearse(run.config(), rank, ranks).memory;
    EXPECT_EQ(real.live, rehearsed.live);
    EXPECT_EQ(real.peak, rehearsed.peak);
    EXPECT_EQ(real.at_peak, rehearsed.at_peak);
    EXPECT_GT(rehearsed.at_peak[static_cast<size_t>(memory::Category::activations)], 0);
  }
}

const Cell kCells[] = {
    {"one_rank", 1, [](auto&) {}},
    {"fp64_on_3", 3, [](auto& c) { c.train.dtype = "fp64"; }},
    {"wire_bf16", 2, [](auto& c) { c.train.reduce_dtype = "bf16"; }},
    {"gpt2_with_dropout", 2, [](auto& c) { c.model.family = "gpt2", c.model.kv_heads = 3, c.model.dropout = 0.1; }},
    {"bf16", 1, [](auto& c) { c.train.dtype = "bf16"; }},
    {"bf16_on_3_micro_batch_1", 3, [](auto& c) { c.train.dtype = "bf16", c.train.micro_batch = 1; }},
    {"bf16_micro_batch_4", 1, [](auto& c) { c.train.dtype = "bf16", c.train.micro_batch = 4; }},
    // The peak is where a gradient is added to its fp32 buffer.
    {"bf16_wide_micro_batch_1", 2, [](auto& c) { c.train.dtype = "bf16", c.train.micro_batch = 1, c.model.hidden = 192; }},
    {"bf16_gpt2", 1, [](auto& c) { c.train.dtype = "bf16", c.model.family = "gpt2", c.model.kv_heads = 3; }},
    {"bf16_zero1", 2, [](auto& c) { c.train.dtype = "bf16", c.parallel.zero = 1; }},
    {"bf16_zero2", 2, [](auto& c) { c.train.dtype = "bf16", c.parallel.zero = 2; }},
    {"bf16_zero3", 2, [](auto& c) { c.train.dtype = "bf16", c.parallel.zero = 3; }},
    {"bf16_zero3_on_one_rank", 1, [](auto& c) { c.train.dtype = "bf16", c.parallel.zero = 3; }},
    {"bf16_recompute_full", 1, [](auto& c) { c.train.dtype = "bf16", c.train.recompute = "full"; }},
    {"fp16", 1, [](auto& c) { c.train.dtype = "fp16"; }},
    {"bf16_long_samples", 1, [](auto& c) { c.train.dtype = "bf16", c.data.seq = 800, c.model.context = 800, c.model.hidden = 48, c.model.ffn = 16, c.model.vocab = 20; }},
    {"bf16_recompute_on_2_zero3", 2, [](auto& c) { c.train.dtype = "bf16", c.train.recompute = "full", c.parallel.zero = 3; }},
    {"tied_head", 2, [](auto& c) { c.model.tied_head = "yes"; }},
    // The peak is inside attention's backward, with its scratch.
    {"long_samples", 1, [](auto& c) { c.data.seq = 800, c.model.context = 800, c.model.hidden = 12, c.model.ffn = 16, c.model.vocab = 20; }},
    {"recompute_full", 2, [](auto& c) { c.train.recompute = "full"; }},
    {"recompute_half_on_gpt2", 1, [](auto& c) { c.train.recompute = "half", c.model.family = "gpt2", c.model.kv_heads = 3, c.model.dropout = 0.1; }},
    {"recompute_zero1", 2, [](auto& c) { c.train.recompute = "keep_attention", c.train.recompute_every = 2, c.parallel.zero = 1; }},
    {"zero1", 2, [](auto& c) { c.parallel.zero = 1; }},
    {"zero1_in_replicas_of_2", 4, [](auto& c) { c.parallel.zero = 1, c.parallel.dp_shard = 2; }},
    {"zero2_on_3", 3, [](auto& c) { c.parallel.zero = 2; }},
    {"zero3_fp64", 2, [](auto& c) { c.parallel.zero = 3, c.train.dtype = "fp64"; }},
    {"zero3_on_3", 3, [](auto& c) { c.parallel.zero = 3; }},
    {"zero3_on_4_without_accumulation", 4, [](auto& c) { c.parallel.zero = 3, c.train.micro_batch = 3, c.parallel.prefetch = 2; }},
    {"zero3_keep_wire_bf16", 2, [](auto& c) { c.parallel.zero = 3, c.parallel.reshard_after_forward = false, c.train.reduce_dtype = "bf16"; }},
    {"zero3_recompute_full_parameters_on_host", 2, [](auto& c) { c.parallel.zero = 3, c.train.recompute = "full", c.offload.parameters = "cpu"; }},
    {"zero3_recompute_half_on_3", 3, [](auto& c) { c.parallel.zero = 3, c.train.recompute = "half", c.train.recompute_every = 2, c.parallel.prefetch = 2; }},
    {"zero3_recompute_keep_whole", 2, [](auto& c) { c.parallel.zero = 3, c.train.recompute = "keep_attention", c.parallel.reshard_after_forward = false; }},
    {"zero3_reshard_group", 4, [](auto& c) { c.parallel.zero = 3, c.parallel.reshard_group = 2; }},
    {"zero2_in_replicas_of_2", 4, [](auto& c) { c.parallel.zero = 2, c.parallel.dp_shard = 2, c.train.micro_batch = 1, c.train.reduce_dtype = "bf16"; }},
    {"zero3_in_replicas_of_2_fp64", 4, [](auto& c) { c.parallel.zero = 3, c.parallel.dp_shard = 2, c.train.micro_batch = 1, c.train.dtype = "fp64"; }},
};
INSTANTIATE_TEST_SUITE_P(Runs, Rehearsal, ::testing::ValuesIn(kCells), [](const auto& info) { return info.param.name; });

/// Bytes at the peaks of attention alone, forward and backward, above what its inputs hold.
std::pair<int64_t, int64_t> attention_peaks(const std::vector<int64_t>& sizes, at::ScalarType dtype, at::Device device) {
  const auto space = device.is_meta() ? memory::Space::meta : memory::Space::cpu;
  const auto options = at::TensorOptions(dtype).device(device);
  const auto leaf = [&] { return at::zeros(sizes, options).set_requires_grad(true); };
  const at::Tensor q = leaf(), k = leaf(), v = leaf();
  const at::Tensor gradient = at::zeros({sizes[0], sizes[1], sizes[2] * sizes[3]}, options);
  const int64_t before = memory::usage(space).live;
  memory::reset_peak(space);
  const at::Tensor out = nn::attend(q, k, v, model::AttentionSpec{}, nn::Kernels::fused);
  const int64_t forward = memory::usage(space).peak - before;
  memory::reset_peak(space);
  out.backward(gradient);
  return {forward, memory::usage(space).peak - before};
}

// [B, T, H, hd]: with scratch of the kernel's own products, copies that matrix units want, a last block of few or odd rows.
TEST(RehearsalOfAttention, HoldsTheScratchOfTheRealKernel) {
  install_cpu_allocator();
  memory::install_meta_counter();
  const int threads = at::get_num_threads();
  at::set_num_threads(1);  // with more, it is chance how many borrow at once
  const std::vector<std::vector<int64_t>> shapes{{2, 40, 3, 16}, {1, 64, 2, 64}, {2, 129, 4, 33}, {1, 300, 2, 64}, {3, 800, 4, 16}, {1, 1000, 1, 64}, {1, 1601, 2, 32}};
  for (const auto& sizes : shapes) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const auto real = attention_peaks(sizes, dtype, at::kCPU);
      EXPECT_EQ(real, attention_peaks(sizes, dtype, at::kMeta)) << at::IntArrayRef(sizes) << " " << dtype;
      EXPECT_GT(real.first, 0);
    }
  }
  at::set_num_threads(threads);
}

TEST(RehearsalThreads, AreGivenBack) {
  const testing::TrainerRun run(configuration());
  const int before = at::get_num_threads();
  train::rehearse(run.config(), 0, 1);
  EXPECT_EQ(at::get_num_threads(), before);
}

}  // namespace
}  // namespace weft
