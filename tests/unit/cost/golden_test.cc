// Worked numbers of the literature, to the printed digits (sources named at each test).
#include <gtest/gtest.h>

#include <cmath>

#include "weft/cost/block.h"
#include "weft/cost/collective.h"
#include "weft/cost/goodput.h"
#include "weft/cost/memory.h"
#include "weft/cost/offload.h"
#include "weft/cost/pipeline.h"
#include "weft/core/error.h"
#include "weft/machine/device.h"
#include "weft/model/presets.h"

namespace weft::cost {
namespace {

constexpr double kGB = 1e9, kGiB = 1024.0 * 1024 * 1024, kMiB = 1024.0 * 1024;

// ZeRO, arXiv 1910.02054, figure 1: 7.5B parameters on 64 devices: 120, 31.4, 16.6, 1.9 GB.
TEST(Golden, ZeroModelStates) {
  const double exact[] = {120, 31.40625, 16.640625, 1.875}, gib[] = {111.759, 29.249, 15.498, 1.746};
  for (int stage = 0; stage <= 3; ++stage) {
    EXPECT_DOUBLE_EQ(zero_state_bytes(7.5e9, 64, stage) / kGB, exact[stage]);
    EXPECT_NEAR(zero_state_bytes(7.5e9, 64, stage) / kGiB, gib[stage], 5e-4);
  }
  EXPECT_DOUBLE_EQ(zero_state_bytes(1e12, 1024, 3) / kGB, 15.625);
  EXPECT_DOUBLE_EQ(zero_state_bytes(7e9, 1, 0) / kGB, 112);
  EXPECT_DOUBLE_EQ((StateBytes{2, 4, 12}.per_parameter(0, 1)) * 7, 126);
  EXPECT_DOUBLE_EQ(zero_traffic_bytes(7e9, 64, 1) / kGB, 27.5625);
  EXPECT_DOUBLE_EQ(zero_traffic_bytes(7e9, 64, 3) / kGB, 41.34375);
}

// Masters (4 bytes) and moments: 12 with AdamW, 8 or 6 where moments are smaller.
TEST(Golden, MomentsOfOptimizers) {
  const std::vector<int64_t> matrix{4096, 1024}, small{63, 65}, vector{8192};
  const double n = 4096.0 * 1024;
  EXPECT_EQ(4 + moment_bytes("adamw", matrix) / n, 12);
  EXPECT_EQ(4 + moment_bytes("adamw_bf16", matrix) / n, 8);
  EXPECT_EQ(4 + moment_bytes("lion", matrix) / n, 8);
  EXPECT_EQ(4 + moment_bytes("muon", matrix) / n, 8);
  EXPECT_EQ(4 + moment_bytes("sgd", matrix) / n, 8);
  EXPECT_EQ(4 + moment_bytes("adam8bit", matrix) / n, 6 + 8.0 / 256);
  EXPECT_EQ(moment_bytes("adam8bit", small), 8 * 63 * 65);
  EXPECT_EQ(moment_bytes("adam8bit", {5000}), 2 * 5000 + 8 * 20);
  EXPECT_EQ(moment_bytes("adafactor", matrix), 4 * (4096 + 1024));
  EXPECT_EQ(moment_bytes("adafactor", vector), 4 * 8192);
  EXPECT_EQ(moment_bytes("adamw", matrix, 8) / n, 16);
  EXPECT_THROW(moment_bytes("adagrad", matrix), ConfigError);
}

TEST(Golden, StateBytesPerParameter) {
  const double ranks[] = {8, 64, 128};
  const double fp32_gradient[] = {7.5, 6.1875, 6.09375}, bf16_gradient[] = {5.5, 4.1875, 4.09375}, fp16[] = {6, 4.25, 4.125};
  const double zero2[] = {4, 2.25, 2.125}, zero3[] = {2.25, 0.28125, 0.140625}, fsdp[] = {2, 0.25, 0.125};
  for (int i = 0; i < 3; ++i) {
    EXPECT_DOUBLE_EQ((StateBytes{2, 4, 12}.per_parameter(1, ranks[i])), fp32_gradient[i]);
    EXPECT_DOUBLE_EQ((StateBytes{2, 2, 12}.per_parameter(1, ranks[i])), bf16_gradient[i]);
    EXPECT_DOUBLE_EQ((StateBytes{2, 2, 16}.per_parameter(1, ranks[i])), fp16[i]);
    EXPECT_DOUBLE_EQ((StateBytes{2, 4, 12}.per_parameter(2, ranks[i])), zero2[i]);
    EXPECT_DOUBLE_EQ((StateBytes{2, 4, 12}.per_parameter(3, ranks[i])), zero3[i]);
    EXPECT_DOUBLE_EQ((StateBytes{4, 4, 8}.per_parameter(3, ranks[i])), fsdp[i]);
  }
}

// Korthikanti et al. 2022 (arXiv 2205.05198), table 2 on GPT-3 with b = 1, t = 8.
TEST(Golden, ClassicActivations) {
  const auto mib = [](ClassicForm form, double tp) { return classic_layer_bytes(2048, 1, 12288, 96, tp, form) / kMiB; };
  EXPECT_DOUBLE_EQ(mib(ClassicForm::tensor, 8), 552);
  EXPECT_DOUBLE_EQ(mib(ClassicForm::sequence, 8), 342);
  EXPECT_DOUBLE_EQ(mib(ClassicForm::selective, 8), 102);
  EXPECT_DOUBLE_EQ(mib(ClassicForm::full, 8), 48);
  // Selective recompute removes 70% of GPT-3's and 65% of MT-NLG's activations.
  const auto removed = [](double hidden, double heads) {
    return 1 - classic_layer_bytes(2048, 1, hidden, heads, 1, ClassicForm::selective) / classic_layer_bytes(2048, 1, hidden, heads, 1, ClassicForm::sequence);
  };
  EXPECT_NEAR(removed(12288, 96), 0.70, 0.005);
  EXPECT_NEAR(removed(20480, 128), 0.65, 0.005);
}

/// Saved bytes per token and hidden unit of one block with a flash kernel and without tensor parallelism.
double activation_factor(const std::string& name) {
  const model::ModelSpec spec = model::preset(name);
  ActivationShape shape;
  shape.tokens = shape.sequence = 8192;
  const double hidden = static_cast<double>(spec.hidden);
  return block_bytes(spec.blocks[0], hidden, false, shape, {}).total() / (shape.tokens * hidden);
}

TEST(Golden, FlashActivations) {
  EXPECT_NEAR(activation_factor("llama3-8b"), 34.031, 5e-4);
  EXPECT_NEAR(activation_factor("llama3-70b"), 33.531, 5e-4);
  EXPECT_NEAR(activation_factor("llama3.1-405b"), 31.781, 5e-4);
  EXPECT_NEAR(activation_factor("llama2-7b"), 32.156, 5e-4);
  const model::ModelSpec spec = model::preset("llama3-8b");
  ActivationShape shape;
  shape.tokens = shape.sequence = 8192;
  const BlockBytes bytes = block_bytes(spec.blocks[0], 4096, false, shape, {});
  EXPECT_EQ(bytes.norms, 268435456);
  EXPECT_EQ(bytes.attention, 134217728 + 33554432 + 1048576);
  EXPECT_EQ(bytes.mlp, 704643072);
  EXPECT_EQ(bytes.total(), 1141899264);
  EXPECT_NEAR(32 * kept_bytes(spec.blocks.front(), bytes, 4096, shape, layout::Recompute::full, true) / kGiB, 2.0, 1e-9);
  // Operation-level recompute: block input, Q, V, attention output, gate and MLP output, log-sum-exp: 15.5 bytes and a bit.
  EXPECT_NEAR(kept_bytes(spec.blocks.front(), bytes, 4096, shape, layout::Recompute::half, true) / (8192.0 * 4096), 15.53, 0.01);
}

TEST(Golden, Flops) {
  struct Row {
    const char* name;
    double linear, attention, head_layers;
  };
  for (const Row& row : {Row{"llama3-8b", 436207616, 134217728, 2.409}, Row{"llama3-70b", 1711276032, 268435456, 1.228}, Row{"llama3.1-405b", 6375342080, 536870912, 0.659}}) {
    const model::ModelSpec spec = model::preset(row.name);
    const double hidden = static_cast<double>(spec.hidden), head = 2 * hidden * static_cast<double>(spec.vocab);
    EXPECT_EQ(block_linear_flops(spec.blocks[0], hidden), row.linear) << row.name;
    EXPECT_EQ(block_attention_flops(spec.blocks[0], 8192, false), row.attention) << row.name;
    EXPECT_NEAR(head / row.linear, row.head_layers, 5e-4) << row.name;
  }
  const model::ModelSpec spec = model::preset("llama3-8b");
  EXPECT_NEAR(training_flops(spec, 8192, false) / 1e9, 57.913, 5e-4);
  EXPECT_NEAR(training_flops(spec, 8192, true) / 1e9, 51.470, 5e-4);
  EXPECT_NEAR(13812 * training_flops(spec, 8192, false) / 1e12, 799.9, 0.05);
  EXPECT_NEAR(13812 * training_flops(spec, 8192, true) / 1e12, 710.9, 0.05);
}

TEST(Golden, Gemm) {
  const Gemm gemm{8192, 14336, 4096};
  EXPECT_NEAR(gemm.flops() / 1e9, 962.07, 0.005);
  EXPECT_NEAR(gemm.flops() / 989e12 * 1e3, 0.9728, 5e-5);
  // 3,584 tiles of 128 x 256 on 132 multiprocessors: 28 waves, 0.9697 full; with k_fill = 384: 0.8866.
  EXPECT_NEAR(gemm_efficiency(gemm, 132, 384), 0.8866, 5e-5);
}

TEST(Golden, Collectives) {
  const double ranks[] = {2, 4, 8, 64}, reduce[] = {1, 1.5, 1.75, 1.96875}, gather[] = {0.5, 0.75, 0.875, 0.984375};
  for (int i = 0; i < 4; ++i) {
    EXPECT_DOUBLE_EQ(all_reduce_factor(ranks[i]), reduce[i]);
    EXPECT_DOUBLE_EQ(all_gather_factor(ranks[i]), gather[i]);
  }
  EXPECT_NEAR(1e3 * ring_all_gather_time(1e9, 8, 3.4e-6, 450e9), 1.9682, 5e-5);
  EXPECT_NEAR(1e3 * ring_all_reduce_time(1e9, 8, 3.4e-6, 450e9), 3.9365, 5e-5);
  EXPECT_NEAR(1e3 * tree_all_reduce_time(1e9, 8, 3.4e-6, 450e9), 4.4648, 5e-5);
  EXPECT_NEAR(1e6 * ring_all_reduce_time(64 * 1024, 64, 14e-6, 25e9), 1769, 0.5);
  EXPECT_NEAR(1e6 * tree_all_reduce_time(64 * 1024, 64, 14e-6, 25e9), 173, 0.5);
  EXPECT_NEAR(1e3 * ring_all_reduce_time(64 * kMiB, 64, 14e-6, 25e9), 7.049, 5e-4);
  EXPECT_NEAR(1e3 * tree_all_reduce_time(64 * kMiB, 64, 14e-6, 25e9), 5.537, 5e-4);
  // 7B bf16 gradients: 24.5 GB per rank on 8 devices, 54.4 ms at 450 GB/s; 551 ms over 64 at 50 GB/s.
  EXPECT_NEAR(1e3 * ring_all_reduce_time(14e9, 8, 0, 450e9), 54.4, 0.05);
  EXPECT_NEAR(1e3 * ring_all_reduce_time(14e9, 64, 0, 50e9), 551, 0.5);
}

TEST(Golden, PipelineBubbles) {
  struct Row {
    double p, m, v, fraction;
  };
  for (const Row& row : {Row{2, 4, 1, 0.2}, Row{4, 8, 1, 0.2727}, Row{4, 32, 1, 0.0857}, Row{8, 8, 1, 0.4667}, Row{8, 32, 1, 0.1795}, Row{8, 32, 4, 0.0519}})
    EXPECT_NEAR(bubble_fraction(row.p, row.m, row.v), row.fraction, 5e-5);
  EXPECT_EQ(micro_batches_for_bubble(8, 0.05), 133);
  // F = 1, B = 2, p = 4, m = 8: 33 units, 9 of them idle; a last stage of 4 units: 41.
  EXPECT_DOUBLE_EQ(uneven_pipeline_time({3, 3, 3, 3}, 8), 33);
  EXPECT_DOUBLE_EQ(uneven_pipeline_time({3, 3, 3, 4}, 8), 41);
  EXPECT_DOUBLE_EQ(uneven_pipeline_time({3, 6, 3, 3}, 8), 57);
}

TEST(Golden, MicroBatchesInFlight) {
  for (int64_t stage = 0; stage < 8; ++stage) EXPECT_EQ(in_flight("1f1b", 8, 1, 64, stage), 8 - stage);
  EXPECT_EQ(in_flight("gpipe", 8, 1, 64, 0), 64);
  EXPECT_EQ(in_flight("1f1b", 8, 1, 4, 0), 4);
  for (int64_t stage = 0; stage < 8; ++stage) EXPECT_EQ(2 * in_flight("1f1b", 8, 2, 64, stage), 23 - 2 * stage);
  EXPECT_EQ(in_flight("1f1b", 8, 2, 64, 0), 11.5);
  // Counted up to W, zero-bubble schedules reach their bound on every stage.
  for (int64_t stage = 0; stage < 8; ++stage) EXPECT_EQ(in_flight("zb-h1", 8, 1, 64, stage), 8);
  EXPECT_EQ(in_flight("zb-h2", 8, 1, 64, 0), 15);
  EXPECT_THROW(in_flight("zigzag", 8, 1, 64, 0), ConfigError);
}

TEST(Golden, InferenceMemory) {
  EXPECT_DOUBLE_EQ(weight_bytes(70e9, 16) / kGB, 140);
  EXPECT_DOUBLE_EQ(weight_bytes(70e9, 8) / kGB, 70);
  EXPECT_DOUBLE_EQ(weight_bytes(70e9, 4) / kGB, 35);
  EXPECT_NEAR(weight_bytes(70e9, 4, 64) / kGB, 37.2, 0.05);
  EXPECT_EQ(kv_cache_bytes_per_token(model::preset("llama3-8b")), 128 * 1024);
  EXPECT_EQ(kv_cache_bytes_per_token(model::preset("llama3-70b")), 320 * 1024);
  EXPECT_EQ(8192 * kv_cache_bytes_per_token(model::preset("llama3-8b")) / kGiB, 1);
  model::ModelSpec all_heads = model::preset("llama3-70b");
  for (model::BlockSpec& block : all_heads.blocks) block.attention.kv_heads = 64;
  EXPECT_EQ(8192 * kv_cache_bytes_per_token(all_heads) / kGiB, 20);
}

TEST(Golden, ComputeAndRidge) {
  // 70B on 15e12 tokens: 6.3e24 FLOP, 4.42 million device-hours at 40% of 989 TFLOP/s; 7B on 1e12 at 50% of 312: 74,786.
  EXPECT_NEAR(6 * 70e9 * 15e12, 6.3e24, 1e20);
  EXPECT_NEAR(device_hours(6.3e24, 0.4 * 989e12) / 1e6, 4.42, 0.005);
  EXPECT_NEAR(device_hours(6 * 7e9 * 1e12, 0.5 * 312e12), 74786, 0.5);
  EXPECT_DOUBLE_EQ(compute_optimal_tokens(70e9), 1.4e12);
  EXPECT_NEAR(machine::find_device("a100").bf16_tflops / machine::find_device("a100").memory_tbps, 156, 0.5);
  EXPECT_NEAR(machine::find_device("h100").bf16_tflops / machine::find_device("h100").memory_tbps, 295, 0.5);
}

// Young 1974, Daly 2006; effective training time as in the Llama 3 report.
TEST(Golden, CheckpointInterval) {
  const double failure = 3 * 3600;
  EXPECT_NEAR(young_interval(60, failure), 1138.4, 0.05);
  EXPECT_NEAR(young_interval(5, failure), 329, 0.5);
  EXPECT_NEAR(daly_interval(60, failure), 1098.8, 0.05);
  EXPECT_NEAR(effective_time(young_interval(60, failure), 60, 600, failure), 0.857, 5e-4);
  EXPECT_NEAR(effective_time(young_interval(5, failure), 5, 600, failure), 0.920, 5e-4);
  EXPECT_NEAR(effective_time(young_interval(60, failure), 60, 180, failure), 0.887, 5e-4);
  EXPECT_NEAR(effective_time(young_interval(5, failure), 5, 180, failure), 0.955, 5e-4);
  EXPECT_NEAR(effective_time(young_interval(60, 8 * 3600), 60, 600, 8 * 3600), 0.920, 5e-4);
  // Llama 3: 466 interruptions in 54 days on 16,384 devices, one per 2.78 hours.
  EXPECT_NEAR(mean_time_to_failure(16384, 54.0 * 24 * 16384 / 466) / 1.0, 2.78, 0.005);
}

TEST(Golden, ContextParallelPairs) {
  EXPECT_EQ(causal_pairs(8, 2, 0, true), 18);
  EXPECT_EQ(causal_pairs(8, 2, 1, true), 18);
  EXPECT_EQ(causal_pairs(8, 2, 0, false), 10);
  EXPECT_EQ(causal_pairs(8, 2, 1, false), 26);
  for (int64_t rank = 0; rank < 4; ++rank) EXPECT_EQ(causal_pairs(64, 4, rank, true), 64 * 65 / 8);
}

// 7B parameters: 14 GB of 16-bit gradients over 63 GB/s of PCIe take 222 ms. The same model's 84 GB of state on a disk of 7 and 5 GB/s.
TEST(Golden, OffloadCostsItsSlowestPart) {
  const OffloadBytes host{.in = 14e9, .update = 28 * 7e9, .out = 14e9};
  const OffloadRates link{.in = 63e9, .update = 1e15, .out = 63e9};
  EXPECT_NEAR(offload_seconds(host, link), 0.2222, 5e-5);
  EXPECT_NEAR(offload_seconds(host, {.in = 63e9, .update = 400e9, .out = 63e9}), 0.49, 1e-9);
  EXPECT_EQ(exposed_offload_seconds(host, {.in = 63e9, .update = 400e9, .out = 63e9}), 0);
  const OffloadBytes disk{.in = 84e9, .update = 168e9, .out = 84e9};
  EXPECT_NEAR(offload_seconds(disk, {.in = 7e9, .update = 400e9, .out = 5e9}), 16.8, 1e-9);
  EXPECT_NEAR(exposed_offload_seconds(disk, {.in = 7e9, .update = 400e9, .out = 5e9}), 16.38, 1e-9);
}

TEST(Golden, StragglerOfManyDevices) {
  EXPECT_NEAR(expected_maximum(8), 1.24, 0.005);
  EXPECT_NEAR(expected_maximum(512), 2.91, 0.005);
  EXPECT_NEAR(expected_maximum(16384), 3.86, 0.005);
}

}  // namespace
}  // namespace weft::cost
