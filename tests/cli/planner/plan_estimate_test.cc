// `weft plan` and `weft estimate` as a user runs them: exit codes, findings, JSON.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/support/command.h"
#include "weft/core/json.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using ::weft::testing::CommandResult;
using ::weft::testing::weft_command;
using ::weft::testing::weft_output;

TEST(EstimateCommand, PrintsMemoryTimeAndRates) {
  const CommandResult answer = weft_command("estimate --model llama3-70b --machine h100 --devices 64 --batch 512 --seq 8192 --tp 8 --pp 4 --chunks 5 --price 2");
  EXPECT_EQ(answer.exit_code, 0);
  for (const char* text : {"optimizer state", "matrix products", "MFU", "per billion tokens", "GiB"}) EXPECT_THAT(answer.out, HasSubstr(text));
}

TEST(EstimateCommand, JsonAndCampaign) {
  const CommandResult answer = weft_command("estimate --model llama3-8b --devices 8 --batch 128 --tokens 1e12 --price 2 --json");
  EXPECT_EQ(answer.exit_code, 0);
  const Json json = Json::parse(answer.out);
  EXPECT_GT(json["time"]["step_s"].get<double>(), 0);
  EXPECT_EQ(json["parameters"].get<double>(), 8030261248.0);
  const double effective = json["campaign"]["effective_time"].get<double>();
  EXPECT_GT(effective, 0.9);
  EXPECT_LT(effective, 1);
}

TEST(EstimateCommand, InferenceMemory) {
  const Json json = Json::parse(weft_command("estimate --model llama3-8b --inference 16 --seq 8192 --json").out);
  EXPECT_EQ(json["kv_cache_bytes"].get<double>(), 1024.0 * 1024 * 1024);
  EXPECT_EQ(json["weights_bytes"].get<double>(), 2 * 8030261248.0);
}

TEST(EstimateCommand, ReadsATrainingConfigurationAndCountsEnergy) {
  const std::string path = ::testing::TempDir() + "/weft_estimate_config.toml";
  std::ofstream(path) << "[model]\npreset = \"llama3-8b\"\n[data]\nseq = 4096\n[train]\nglobal_batch = 64\nmicro_batch = 2\ndtype = \"bf16\"\n";
  const CommandResult answer = weft_command("estimate --config " + path + " --devices 8 --zero 3 --watts 1000 --tokens 1e12 --json");
  ASSERT_EQ(answer.exit_code, 0);
  const Json json = Json::parse(answer.out);
  EXPECT_EQ(json["layout"]["global_batch"], 64);
  EXPECT_EQ(json["layout"]["micro_batch"], 2);
  EXPECT_GT(json["kwh_per_billion_tokens"].get<double>(), 0);
  EXPECT_NEAR(json["campaign"]["energy_kwh"].get<double>(), json["campaign"]["device_hours"].get<double>(), 1);
  EXPECT_EQ(Json::parse(weft_command("estimate --config " + path + " --devices 8 --batch 128 --json").out)["layout"]["global_batch"], 128);
  EXPECT_EQ(weft_command("estimate --config /nonexistent.toml").exit_code, 2);
  // Ranks, sharding and 16-bit gradients are the configuration's too; options win.
  std::ofstream(path, std::ios::app) << "gradient_dtype = \"bf16\"\n[layout]\ndp = 16\n[parallel]\nzero = 3\ndp_shard = 8\n";
  const Json whole = Json::parse(weft_command("estimate --config " + path + " --json").out), other = Json::parse(weft_command("estimate --config " + path + " --zero 1 --shard-group 4 --devices 32 --json").out);
  EXPECT_EQ(whole["devices"], 16);
  EXPECT_EQ(whole["layout"]["zero"], 3);
  EXPECT_EQ(whole["layout"]["shard_group"], 8);
  EXPECT_EQ(other["layout"]["zero"], 1);
  EXPECT_EQ(other["layout"]["shard_group"], 4);
  EXPECT_NEAR(other["memory"]["gradients_gib"].get<double>(), 2 * 8030261248.0 / (1 << 30), 1e-3);
}

TEST(EstimateCommand, OffloadSaysWhatTheHostHolds) {
  const std::string job = "estimate --model llama3-8b --devices 1 --batch 8 --seq 4096 --offload";
  EXPECT_THAT(weft_command(job).out, HasSubstr("on the host of a node"));
  const Json json = Json::parse(weft_command(job + " --host-memory 64 --json").out);
  EXPECT_NEAR(json["memory"]["host_gib_per_rank"].get<double>(), 16 * 8030261248.0 / (1 << 30), 1e-3);
  EXPECT_EQ(json["memory"]["fit_probability"], 0);
  EXPECT_THAT(weft_command(job + " --host-memory 64").out, HasSubstr("DOES NOT FIT"));
}

TEST(EstimateCommand, PlansForThisMachineAndForMeasuredOnes) {
  EXPECT_EQ(weft_command("estimate --model gpt2 --machine local --precision fp32 --batch 8 --seq 256").exit_code, 0);
  const std::string path = ::testing::TempDir() + "/weft_machine.toml";
  std::ofstream(path) << "[machine]\nname = \"mine\"\ndevices = 2\ncores = 1\nmemory_gib = 12.0\nmemory_gbps = 10.0\nmatmul_fp32_gflops = 100.0\nlink_gbps = 3.0\noperation_us = 2.0\n";
  const std::string job = "estimate --model gpt2 --precision fp32 --batch 8 --seq 256 --devices 2 --json --machine ";
  const Json json = Json::parse(weft_command(job + path).out);
  EXPECT_EQ(json["device"], "mine");
  // 6 x 124 M parameters x 8 x 256 tokens on two devices of 100 GFLOP/s take at least 7.6 s.
  EXPECT_GT(json["time"]["step_s"].get<double>(), 7.6);
  EXPECT_LT(json["time"]["step_s"].get<double>(), 20);
  std::ofstream(path) << "[machine]\nname = 3\n";
  EXPECT_THAT(weft_output(job + path).out, HasSubstr("matmul_fp32_gflops: is missing"));
}

TEST(EstimateCommand, FindingsAllAtOnceWithExitTwo) {
  const CommandResult answer = weft_output("estimate --model llama3-8b --tp 12 --devices 36 --batch 256");
  EXPECT_EQ(answer.exit_code, 2);
  EXPECT_THAT(answer.out, HasSubstr("12 ranks cannot share out 32 query heads over 8 key heads"));
  EXPECT_THAT(answer.out, HasSubstr("use 255 or 258"));
  for (const char* bad : {"estimate --machine h101", "estimate --model lama", "estimate --devices 0", "estimate --precision int3", "estimate --recompute some", "estimate --seq -4", "estimate --constant gemm_share",
                          "estimate --pp 0", "estimate --runs /nonexistent.csv", "plan --devices 0", "plan --batch 0", "plan --objective fun", "plan --tp 3", "plan --export slurm", "plan --nic -1", "plan --schedule zigzag", "estimate --machine /nonexistent.toml"}) {
    const CommandResult refused = weft_output(bad);
    EXPECT_EQ(refused.exit_code, 2) << bad << "\n" << refused.out;
    EXPECT_GT(refused.out.size(), 20u) << bad;
  }
}

TEST(EstimateCommand, RunsFile) {
  const std::filesystem::path runs = std::filesystem::path(::testing::TempDir()) / "weft_cli_runs.csv";
  std::ofstream(runs) << "id,model,layers,hidden,ffn_hidden,heads,kv_heads,vocab,seq_len,micro_batch,global_batch_seqs,gpus,gpu,tp,pp\n"
                         "x-1,Llama-3-8B,32,4096,14336,32,8,128256,8192,1,128,8,H100-80GB-SXM,1,1\nx-2,Llama-3-8B,32,4096,14336,32,8,128256,8192,1,128,8,,1,1\n";
  const CommandResult answer = weft_command("estimate --runs " + runs.string());
  EXPECT_EQ(answer.exit_code, 0);
  EXPECT_THAT(answer.out, HasSubstr("id,step_time_s,peak_mem_gb,fits,p_fit,reason\nx-1,"));
  EXPECT_THAT(answer.out, HasSubstr("missing gpu"));
}

TEST(PlanCommand, RanksExplainsAndWritesAPlan) {
  const std::filesystem::path plan = std::filesystem::path(::testing::TempDir()) / "weft_cli_plan.toml";
  const CommandResult answer = weft_command("plan --model llama3-70b --machine h100 --devices 64 --batch 256 --seq 8192 --out " + plan.string());
  EXPECT_EQ(answer.exit_code, 0);
  for (const char* text : {"legal layouts", "simulated action by action", "tp2 tensor parallel", "Why", "What does not fit", "over by", "What would help"}) EXPECT_THAT(answer.out, HasSubstr(text));
  const std::string toml = read_text(plan);
  EXPECT_THAT(toml, HasSubstr("[layout]"));
  EXPECT_THAT(toml, HasSubstr("global_batch = 256"));
}

TEST(PlanCommand, CostsEnergyAndObjectives) {
  const std::string job = "plan --model llama3-8b --devices 8 --batch 64 --price 2 --watts 700";
  EXPECT_THAT(weft_command(job).out, HasSubstr("A billion tokens with the best layout: "));
  const Json json = Json::parse(weft_command(job + " --objective cost --json").out);
  const double hours = 8 / 3600.0 / json["ranked"][0]["tokens_per_second"].get<double>() * 1e9;
  EXPECT_NEAR(json["price_per_billion_tokens"].get<double>(), 2 * hours, 1e-6 * hours);
  EXPECT_NEAR(json["kwh_per_billion_tokens"].get<double>(), 0.7 * hours, 1e-6 * hours);
  EXPECT_EQ(Json::parse(weft_command(job + " --objective goodput --json").out)["ranked"], json["ranked"]);
  EXPECT_EQ(weft_command(job + " --objective cheap").exit_code, 2);
}

TEST(PlanCommand, JsonAndExport) {
  const Json json = Json::parse(weft_command("plan --model gpt2 --machine a100 --devices 8 --batch 512 --seq 1024 --json").out);
  EXPECT_EQ(json["ranked"][0]["layout"]["tp"].get<int>(), 1);
  EXPECT_THAT(weft_command("plan --model llama3-70b --devices 64 --batch 256 --seq 8192 --zero 1 --export megatron").out, HasSubstr("--tensor-model-parallel-size"));
}

TEST(PlanCommand, PlansAModuleOfOnesOwn) {
  const std::string spec = ::testing::TempDir() + "/weft_program_spec.json";
  std::ofstream(spec) << R"({"weft_program": 1, "name": "net", "samples": 8, "element_bytes": 4, "parameters": 1e10, "trainable": 1e10, "largest_unit": 1e8,
    "forward_flops": 1.6e14, "backward_flops": 3.2e14, "saved_bytes": 8e9, "peak_bytes": 9e9, "moved_bytes": 2e10, "kernels": 1000})";
  const Json plan = Json::parse(weft_command("plan --spec " + spec + " --machine h100 --devices 16 --batch 256 --json").out);
  EXPECT_GE(plan["ranked"][0]["layout"]["zero"].get<int>(), 1);  // 180 GB of states do not fit
  EXPECT_GT(plan["ranked"][0]["memory"]["fit_probability"].get<double>(), 0.9);
  EXPECT_EQ(plan["rejected"][0]["layout"]["zero"], 0);
  const CommandResult text = weft_command("plan --spec " + spec + " --machine h100 --devices 16 --batch 256");
  for (const char* part : {"samples/s", "What does not fit", "over by", "Why"}) EXPECT_THAT(text.out, HasSubstr(part));
  const Json one = Json::parse(weft_command("estimate --spec " + spec + " --devices 16 --batch 256 --zero 3 --micro-batch 4 --json").out);
  EXPECT_NEAR(one["memory"]["optimizer_gib"].get<double>() * (1 << 30), 12e10 / 16, 1e3);
  EXPECT_GT(one["time"]["step_s"].get<double>(), 4.8e14 * 2 / 1e15);
  // Findings: what does not divide, degrees that need layers, contradictions, a file with missing and unknown keys.
  const auto refused = [&](const std::string& arguments, const char* part) {
    const CommandResult answer = weft_command(arguments);
    EXPECT_EQ(answer.exit_code, 2) << arguments;
    EXPECT_THAT(answer.err, HasSubstr(part)) << arguments;
  };
  refused("estimate --spec " + spec + " --devices 16 --batch 250", "batch = 256");
  refused("estimate --spec " + spec + " --devices 16 --batch 256 --micro-batch 3", "1, 2, 4, 8, 16");
  refused("estimate --spec " + spec + " --devices 16 --batch 256 --tp 2", "data-parallel ranks alone");
  refused("simulate --spec " + spec, "no pipeline");
  refused("plan --spec /nonexistent.json", "/nonexistent.json");
  EXPECT_NE(weft_command("plan --spec " + spec + " --model gpt2").exit_code, 0);
  std::ofstream(spec) << R"({"weft_program": 1, "samples": 0, "parametres": 1})";
  refused("plan --spec " + spec, "did you mean parameters?");
  refused("plan --spec " + spec, "kernels: is missing");
}

TEST(PlanCommand, ReadsAConfigJson) {
  const CommandResult answer = weft_command("plan --model " WEFT_TEST_DATA "/hf_configs/llama.v5.json --devices 4 --batch 64 --seq 64");
  EXPECT_EQ(answer.exit_code, 0);
  EXPECT_THAT(answer.out, HasSubstr("legal layouts"));
}

}  // namespace
}  // namespace weft
