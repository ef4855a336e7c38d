// The estimate: published memory figures, monotone behaviour, rows of a runs table.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <sstream>

#include "weft/core/error.h"
#include "weft/cost/tuning.h"
#include "weft/model/presets.h"
#include "weft/plan/run_facts.h"
#include "weft/plan/runs.h"

namespace weft::plan {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;

Job job_of(const char* preset, const char* device, layout::Layout layout, int64_t sequence) {
  Job job;
  job.model = ModelSummary::of(model::preset(preset), sequence);
  job.machine = machine::Machine::of(device);
  job.layout = layout;
  job.sequence = sequence;
  return job;
}

layout::Layout layout_of(int64_t tp, int64_t pp, int64_t dp, int64_t batch) {
  layout::Layout layout;
  layout.tp = tp, layout.pp = pp, layout.dp = dp, layout.global_batch = batch, layout.sequence_parallel = tp > 1, layout.zero = 1;
  return layout;
}

// Korthikanti et al. 2022, figure 1: states plus activations of the first stage, GiB.
TEST(AnalyticMemory, KorthikantiFigure1) {
  struct Row {
    const char* preset;
    int64_t pp, chunks, micro_batch;
    double whole, selective;
  };
  for (const Row& row : {Row{"gpt-22b", 1, 1, 4, 104.8125, 55.125}, Row{"gpt3-175b", 8, 3, 1, 112.4062, 57.9141}, Row{"mt-nlg-530b", 35, 3, 1, 145.6641, 54.7168}, Row{"gpt-1t", 64, 1, 1, 164.209, 59.5215}}) {
    layout::Layout layout = layout_of(8, row.pp, 1, row.pp * row.micro_batch);
    layout.chunks = row.chunks;
    layout.micro_batch = row.micro_batch;
    layout.sequence_parallel = false;
    Job job = job_of(row.preset, "a100", layout, 2048);
    EXPECT_NEAR(analytic_bytes(job) / kGiB, row.whole, 1e-3) << row.preset;
    job.layout.sequence_parallel = true;
    job.layout.recompute = layout::Recompute::attention;
    EXPECT_NEAR(analytic_bytes(job) / kGiB, row.selective, 1e-3) << row.preset;
  }
}

// Allocated GiB of Llama-3-70B cut to 12 layers on 8 B200 (SimuMax, docs/b200 "real" columns), within 1%.
TEST(Memory, MeasuredTensorParallelRuns) {
  model::ModelSpec spec = model::preset("llama3-70b");
  spec.blocks.resize(12);
  struct Row {
    int64_t tp, pp, dp;
    double gib;
  };
  for (const Row& row : {Row{1, 2, 4, 66.55}, Row{2, 1, 4, 60.68}, Row{4, 1, 2, 39.07}, Row{8, 1, 1, 28.29}}) {
    Job job = job_of("llama3-70b", "b200", layout_of(row.tp, row.pp, row.dp, 4 * row.dp), 4096);
    job.model = ModelSummary::of(spec, 4096);
    job.software.loss = machine::Software::Loss::in_place;
    EXPECT_NEAR(peak_memory(job, {}).allocated() / kGiB / row.gib, 1, 0.01) << "tp " << row.tp;
  }
}

TEST(Time, TermsAddUpToTheStep) {
  for (int64_t pp : {1, 4}) {
    const Job job = job_of("llama3-8b", "h100", layout_of(2, pp, 2, 64), 8192);
    const Time t = step_time(job, {});
    const double sum = t.gemm + t.attention + t.memory + t.host + t.recompute + t.tp + t.cp + t.ep + t.pp + t.dp + t.bubble + t.optimizer + t.fixed;
    EXPECT_NEAR(sum / t.step, 1, 1e-9);
    EXPECT_GT(t.step_p95, t.step);
  }
}

TEST(Time, MoreOfEachHelpsOrHurtsAsItMust) {
  const Job base = job_of("llama3-8b", "h100", layout_of(1, 1, 8, 64), 8192);
  const double step = step_time(base, {}).step;
  Job changed = base;
  changed.layout.recompute = layout::Recompute::full;
  EXPECT_GT(step_time(changed, {}).step, 1.2 * step);
  EXPECT_LT(peak_memory(changed, {}).activations, 0.5 * peak_memory(base, {}).activations);
  changed = base;
  changed.precision = machine::Precision::fp8;
  EXPECT_LT(step_time(changed, {}).step, step);
  changed = base;
  changed.layout.global_batch *= 2;
  EXPECT_GT(step_time(changed, {}).step, 1.9 * step);
  changed = base;
  changed.layout.zero = 3;
  EXPECT_LT(peak_memory(changed, {}).optimizer + peak_memory(changed, {}).weights, 0.5 * (peak_memory(base, {}).weights + peak_memory(base, {}).optimizer));
  changed = base;
  changed.machine.nic_gbits = 1;  // one node: the network is not used
  EXPECT_EQ(step_time(changed, {}).step, step);
}

TEST(Time, WhatSoftwareDoesChangesTheTermThatItConcerns) {
  using machine::Software;
  layout::Layout layout = layout_of(8, 1, 8, 64);
  Job job = job_of("llama3-70b", "h100", layout, 8192);
  job.precision = machine::Precision::fp8;
  const Time base = step_time(job, {});
  job.software.low_precision_saved = false;  // what is gathered travels in 16 bit
  EXPECT_GT(step_time(job, {}).tp, 1.2 * base.tp);
  job.software.low_precision_saved = true;
  job.software.scaling = Software::Scaling::current;  // a pass over every input before the cast
  EXPECT_GT(step_time(job, {}).memory, base.memory);
  EXPECT_EQ(step_time(job, {}).gemm, base.gemm);

  layout = layout_of(1, 1, 16, 64);
  layout.ep = 8;
  job = job_of("mixtral-8x7b", "h100", layout, 4096);
  const Time waiting = step_time(job, {});
  job.software.overlap_ep = true;
  EXPECT_LT(step_time(job, {}).ep, 0.5 * waiting.ep);
  job.software.graphs = true;
  EXPECT_NEAR(step_time(job, {}).host, 0, 1e-12);
}

TEST(Time, ReductionsOfInputGradientsHideBesideWeightGradients) {
  for (const bool sequence_parallel : {false, true}) {
    layout::Layout layout = layout_of(8, 1, 1, 8);
    layout.sequence_parallel = sequence_parallel;
    Job job = job_of("gpt3-175b", "a100", layout, 2048);
    const double hidden = step_time(job, {}).tp;
    job.software.overlap_tp_backward = false;
    const double waiting = step_time(job, {}).tp;
    // Of four equal parts two are the backward's. Whole: both hide behind the weight gradients. Sequence parallel: one hides, and what
    // is gathered a second time beside it. A hidden second still costs overlap_slowdown.
    const double slowdown = cost::Tuning{}.overlap_slowdown, share = sequence_parallel ? (1 - 2 * slowdown) / 4 : (1 - slowdown) / 2;
    EXPECT_NEAR(hidden / waiting, 1 - share, 0.01) << sequence_parallel;
  }
}

TEST(Time, BlockingLaunchesAddTheHostsTime) {
  Job job = job_of("llama3-70b", "a100", layout_of(8, 1, 1, 8), 8192);
  EXPECT_NEAR(step_time(job, {}).host, 0, 1e-9);  // large kernels: the host is far ahead
  job.software.blocking_launches = true;
  const double turns = step_time(job, {}).host;
  EXPECT_GT(turns, 0);
  job.layout.micro_batch = 2;  // half as many launches for the same work
  EXPECT_NEAR(step_time(job, {}).host, 0.5 * turns, 1e-6 * turns);
}

TEST(Time, FusedSoftmaxTakesMatricesByFours) {
  // Two heads per rank: one sequence makes two matrices of scores, two make four.
  Job job = job_of("gpt-22b", "a100", layout_of(8, 1, 1, 16), 2048);
  for (ModelSummary::Kind& kind : job.model.kinds) kind.block.attention.heads = kind.block.attention.kv_heads = 16;
  job.software.attention = machine::Software::Attention::unfused;
  const auto attention = [&](int64_t micro_batch) {
    job.layout.micro_batch = micro_batch;
    return step_time(job, {}).attention;
  };
  EXPECT_GT(attention(1), 1.5 * attention(2));
  EXPECT_NEAR(attention(4), attention(2), 0.1 * attention(2));
}

TEST(Time, UnalignedHeadsLeaveTheMatrixUnits) {
  Job job = job_of("gpt-22b", "a100", layout_of(8, 1, 1, 16), 2048);
  job.software.attention = machine::Software::Attention::unfused;
  const auto attention = [&](int64_t head_dim) {
    for (ModelSummary::Kind& kind : job.model.kinds) kind.block.attention.head_dim = head_dim;
    return step_time(job, {}).attention;
  };
  EXPECT_GT(attention(108), 2 * attention(112));
  job.software.attention = machine::Software::Attention::flash;
  EXPECT_LT(attention(108), attention(112));
}

TEST(Time, StageTimesSumToTheStepOfOneMicroBatch) {
  Job job = job_of("llama3-8b", "h100", layout_of(1, 4, 1, 1), 8192);
  double sum = 0;
  for (const StageTimes& stage : stage_times(job, {})) {
    EXPECT_GT(stage.forward, 0);
    EXPECT_GT(stage.weight, 0);
    sum += stage.forward + stage.input + stage.weight;
  }
  const Time time = step_time(job, {});
  EXPECT_NEAR(sum, time.gemm + time.attention + time.memory + time.host + time.tp + time.bubble, 1e-9);
}

TEST(Memory, Fp32HoldsSixteenBytesOfStateAndTwiceTheActivations) {
  layout::Layout layout = layout_of(1, 1, 1, 4);
  layout.zero = 0;
  Job job = job_of("gpt2", "a100", layout, 1024);
  const Memory half = peak_memory(job, {});
  job.precision = machine::Precision::fp32;
  const Memory whole = peak_memory(job, {});
  EXPECT_NEAR((whole.weights + whole.gradients + whole.optimizer) / (half.weights + half.gradients + half.optimizer), 16.0 / 18, 1e-9);
  EXPECT_NEAR(whole.activations / half.activations, 2, 1e-9);
}

TEST(Time, AMeasuredMachineIsTakenAtItsWord) {
  Job job = job_of("gpt2", "a100", layout_of(1, 1, 2, 8), 256);
  job.precision = machine::Precision::fp32;
  job.software.graphs = true;
  machine::Device& device = job.machine.device;
  device.calibrated = true, device.matmul_fp32_tflops = 0.1, device.memory_tbps = 0.01, device.operation_us = 1, device.link_gbps = 2;
  const Time all = step_time(job, {});
  EXPECT_LT(all.fixed, 0.01 * all.step);  // nothing of Python's
  device.training_share_fp32 = 0.5, device.training_share_bf16 = 0.1;
  const Time slower = step_time(job, {});
  EXPECT_NEAR(slower.gemm / all.gemm, 2, 1e-9);
  EXPECT_NEAR(slower.memory / all.memory, 2, 1e-9);
  EXPECT_NEAR(slower.dp / all.dp, 1, 0.2);  // links are measured apart
}

TEST(Memory, FitProbabilityIsOneHalfAtTheEdge) {
  EXPECT_NEAR(fit_probability(80, 80, 0.05), 0.5, 1e-12);
  EXPECT_GT(fit_probability(70, 80, 0.05), 0.99);
  EXPECT_LT(fit_probability(90, 80, 0.05), 0.02);
}

std::string write_runs(const std::string& body) {
  const std::string path = testing::TempDir() + "/weft_runs_" + std::to_string(::testing::UnitTest::GetInstance()->random_seed()) + ".csv";
  std::ofstream(path) << "id,model,layers,hidden,ffn_hidden,heads,kv_heads,vocab,seq_len,micro_batch,global_batch_seqs,gpus,gpu,precision,tp,pp,year,notes,flash_attention\n" << body;
  return path;
}

TEST(Runs, RowsBecomePredictionsOrReasons) {
  const std::string path = write_runs(
      "a-1,Llama-3-8B,32,4096,14336,32,8,128256,8192,1,128,8,H100-80GB-SXM,bf16,1,1,2024,\"quoted, with \"\"comma\"\"\",yes\n"
      "a-2,Llama-3-8B,32,4096,14336,32,8,128256,8192,1,128,8,X900,bf16,1,1,2024,,yes\n"
      "a-3,Llama-3-8B,32,4096,14336,32,8,128256,,1,128,8,H100-80GB-SXM,bf16,1,1,2024,,yes\n"
      "a-4,Llama-3-8B,32,4096,14336,32,8,128256,8192,1,128,8,H100-80GB-SXM,bf16,3,1,2024,,yes\n");
  const std::vector<RunRow> rows = read_runs(path);
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[0].text("notes"), "quoted, with \"comma\"");
  const RunPrediction good = predict_run(rows[0], {});
  EXPECT_EQ(good.reason, "");
  EXPECT_GT(good.step_time_s, 1);
  EXPECT_NE(predict_run(rows[1], {}).reason.find("X900"), std::string::npos);
  EXPECT_NE(predict_run(rows[2], {}).reason.find("seq_len"), std::string::npos);
  EXPECT_NE(predict_run(rows[3], {}).reason.find("does not divide"), std::string::npos);
  std::ostringstream out;
  write_predictions(out, {good, predict_run(rows[2], {})});
  EXPECT_EQ(out.str().substr(0, 46), "id,step_time_s,peak_mem_gb,fits,p_fit,reason\na");
}

TEST(Runs, BrokenFilesAreErrors) {
  EXPECT_THROW(read_runs("/nonexistent/runs.csv"), ConfigError);
  EXPECT_THROW(read_runs(write_runs("a-1,too,few\n")), ConfigError);
}

TEST(Runs, FactsFromWords) {
  const auto machine_for = [](const std::string& net, const std::string& node) { return machine_of_run(RunRow({{"gpu", "A100-80GB-SXM"}, {"interconnect", net}, {"node_gpus", node}})); };
  EXPECT_DOUBLE_EQ(machine_for("NVLink3; 800 Gb/s per node between nodes", "8").nic_gbits, 100);
  EXPECT_DOUBLE_EQ(machine_for("NVLink3 + 4x100 Gb/s Omni-Path per node", "8").nic_gbits, 50);
  EXPECT_DOUBLE_EQ(machine_for("NVLink; 400 Gb/s RDMA per GPU", "8").nic_gbits, 400);
  EXPECT_DOUBLE_EQ(machine_for("", "8").nic_gbits, 200);
  EXPECT_TRUE(machine_for("NVLink3 + 4x100 Gb/s Omni-Path per node", "8").host_network);
  EXPECT_FALSE(machine_for("NVLink3 + 4x100 Gb/s RoCE per node", "8").host_network);
  using machine::Software;
  const auto software_for = [](const char* gpu, const char* precision, const char* notes) {
    return software_of_run(RunRow({{"gpu", gpu}, {"precision", precision}, {"notes", notes}}), machine::Machine::of(gpu));
  };
  EXPECT_EQ(software_for("GB200", "fp8", "NeMo container 25.11; precision as printed: FP8-MX").scaling, Software::Scaling::block);
  EXPECT_EQ(software_for("GB200", "fp8", "NeMo container 26.02; precision as printed: FP8").scaling, Software::Scaling::current);
  EXPECT_EQ(software_for("H100", "fp8", "MLPerf Training v5.0").scaling, Software::Scaling::delayed);
  EXPECT_TRUE(software_for("GB200", "fp8", "NeMo container 26.06.01; x").graphs);
  EXPECT_FALSE(software_for("H100", "fp8", "NeMo container 26.06.01; x").graphs);
  const auto expert_software = [](const char* gpu) {
    return software_of_run(RunRow({{"gpu", gpu}, {"precision", "fp8"}, {"experts", "128"}, {"notes", "NeMo container 25.11; precision as printed: FP8-MX"}}), machine::Machine::of(gpu));
  };
  EXPECT_TRUE(expert_software("GB200").captured_blocks);
  EXPECT_FALSE(expert_software("B200-SXM").captured_blocks);
  const auto sharded = [](const char* strategy, const char* source) {
    return software_of_run(RunRow({{"gpu", "H100"}, {"precision", "bf16"}, {"zero_stage_or_fsdp", strategy}, {"source", source}, {"year", "2025"}}), machine::Machine::of("H100"));
  };
  EXPECT_EQ(sharded("HSDP", "torchtitan").kernels, Software::Kernels::eager);
  EXPECT_TRUE(sharded("FSDP", "torchtitan").sharded_copies);
  EXPECT_FALSE(sharded("FSDP", "torchtitan").overlap_tp_backward);
  EXPECT_EQ(sharded("FSDP", "NVIDIA-NeMo/Megatron-Bridge").kernels, Software::Kernels::fused);
  EXPECT_FALSE(sharded("FSDP", "NVIDIA-NeMo/Megatron-Bridge").sharded_copies);
  EXPECT_TRUE(sharded("none", "BigScience tr11-176B chronicles").blocking_launches);
  EXPECT_FALSE(sharded("none", "Megatron-LM").blocking_launches);
  const Software modules = software_for("H100", "bf16", "dispatcher DeepEP; recompute modules: norm, act; +1F1B all-to-all overlap");
  EXPECT_TRUE(modules.recompute_norms && modules.recompute_activation && modules.overlap_ep && !modules.recompute_mlp);
}

TEST(Runs, WhatARowLeavesOutComesFromItsFamily) {
  const std::map<std::string, std::string> row = {{"id", "a-1"}, {"model", "InternLM 7B"}, {"layers", "32"}, {"hidden", "4096"}, {"heads", "32"}, {"seq_len", "2048"},
                                                  {"micro_batch", "2"}, {"global_batch_seqs", "64"}, {"gpus", "8"}, {"gpu", "A100-80GB-SXM"}, {"tp", "1"}, {"pp", "1"}};
  EXPECT_NE(predict_run(RunRow(row), {}).assumptions.find("vocab 103168"), std::string::npos);
  std::map<std::string, std::string> experts = row;
  experts["model"] = "GPT-OSS 20B", experts["experts"] = "32", experts["notes"] = "kernels TE + DeepEP";
  EXPECT_NE(predict_run(RunRow(experts), {}).assumptions.find("ep 8"), std::string::npos);
  experts["notes"] = "";
  EXPECT_EQ(predict_run(RunRow(experts), {}).assumptions.find("ep 8"), std::string::npos);
}

}  // namespace
}  // namespace weft::plan
