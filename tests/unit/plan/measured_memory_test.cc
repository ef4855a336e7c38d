// Peak memory that others measured and published, against the model: one case per mechanism.
#include <gtest/gtest.h>

#include <map>

#include "weft/config/fields.h"
#include "weft/config/parse.h"
#include "weft/model/presets.h"
#include "weft/plan/export.h"
#include "weft/plan/run_facts.h"
#include "weft/plan/runs.h"

namespace weft::plan {
namespace {

using Fields = std::map<std::string, std::string>;

RunPrediction predict(Fields fields, const Fields& more) {
  for (const auto& [key, value] : more) fields[key] = value;
  return predict_run(RunRow(fields), {});
}

const Fields kLlama8b = {{"id", "a-1"}, {"model", "Llama-3.1-8B"}, {"layers", "32"}, {"hidden", "4096"}, {"ffn_hidden", "14336"}, {"heads", "32"}, {"kv_heads", "8"}, {"vocab", "128256"},
                         {"seq_len", "8192"}, {"micro_batch", "2"}, {"tp", "1"}, {"pp", "1"}, {"recompute", "selective"}, {"zero_stage_or_fsdp", "FSDP2 (ZeRO-3)"}, {"mem_kind", "reserved"}};

// pytorch/torchtitan benchmarks, llama3_h100_202412 and llama3-8b_h200_202506: reserved GiB, maximum over ranks.
TEST(MeasuredMemory, TorchtitanSelectiveRecompute) {
  const Fields h100 = {{"gpu", "H100-96GB-HBM2e"}, {"precision", "bf16"}, {"year", "2024"}};
  const auto on = [&](const char* gpus, const char* batch, const char* notes) {
    Fields fields = h100;
    fields["gpus"] = gpus, fields["global_batch_seqs"] = batch, fields["notes"] = notes;
    return predict(kLlama8b, fields).peak_mem_gib;
  };
  EXPECT_NEAR(on("8", "16", "FSDP + torch.compile") / 77.0, 1, 0.03);
  EXPECT_NEAR(on("8", "16", "FSDP eager") / 82.4, 1, 0.03);
  EXPECT_NEAR(on("128", "256", "FSDP + torch.compile") / 62.0, 1, 0.03);
  // A compiled loss keeps two 16-bit copies of the logits instead of three fp32 ones.
  const Fields h200 = {{"gpu", "H200-SXM"}, {"precision", "fp8"}, {"year", "2025"}, {"gpus", "32"}, {"global_batch_seqs", "64"}, {"notes", "compile + float8 tensorwise"}};
  EXPECT_NEAR(predict(kLlama8b, h200).peak_mem_gib / 47.96, 1, 0.03);
}

// Zero Bubble Pipeline Parallelism, arXiv 2401.10241, table of the 1.5B model: GB by schedule.
TEST(MeasuredMemory, ZeroBubbleHoldsActivationsUntilW) {
  const Fields row = {{"id", "a-1"}, {"model", "GPT 1.5B"}, {"layers", "22"}, {"hidden", "2304"}, {"heads", "24"}, {"seq_len", "1024"}, {"micro_batch", "6"}, {"global_batch_seqs", "192"}, {"year", "2024"},
                      {"gpus", "8"}, {"gpu", "A100-80GB-SXM"}, {"tp", "1"}, {"pp", "8"}, {"recompute", "none"}};
  const auto gib = [&](const char* schedule) { return predict(row, {{"notes", schedule}}).peak_mem_gib; };
  EXPECT_NEAR(gib("schedule 1F1B") / 30, 1, 0.1);
  EXPECT_NEAR(gib("schedule ZB-1p") / 32, 1, 0.1);
  EXPECT_NEAR(gib("schedule ZB-2p") / 59, 1, 0.1);
  EXPECT_NEAR(gib("schedule 1F1B-I") / 40, 1, 0.1);
}

// A run that is silent about recompute ran, so its memory is that of the mildest recompute that fits.
TEST(MeasuredMemory, UnstatedRecomputeIsInferred) {
  const Fields base = {{"gpu", "H100-80GB-SXM"}, {"gpus", "8"}, {"global_batch_seqs", "32"}, {"micro_batch", "4"}, {"precision", "bf16"}, {"year", "2025"}, {"notes", "compile"}};
  Fields silent = base, stated = base;
  silent["recompute"] = "", stated["recompute"] = "none";
  const RunPrediction inferred = predict(kLlama8b, silent);
  EXPECT_GE(inferred.p_fit, 0.5);
  EXPECT_NE(inferred.assumptions.find("memory with recompute"), std::string::npos) << inferred.assumptions;
  EXPECT_LT(predict(kLlama8b, stated).p_fit, 0.01);
}

// NeMo's recipes reduce gradients in bf16, Megatron-LM in fp32; "none" answers whether FSDP is used, not which ZeRO stage.
TEST(MeasuredMemory, StacksKeepGradientsDifferently) {
  using machine::Software;
  const machine::Machine machine = machine::Machine::of("h100");
  const auto gradients = [&](const char* source) { return software_of_run(RunRow({{"source", source}, {"precision", "bf16"}, {"year", "2025"}}), machine).gradients; };
  EXPECT_EQ(gradients("NVIDIA Megatron-Bridge performance summary"), Software::Gradients::half);
  EXPECT_EQ(gradients("NVIDIA/Megatron-LM examples, nemotron"), Software::Gradients::fp32);
  const RunRow row({{"zero_stage_or_fsdp", "none"}, {"year", "2025"}, {"layers", "2"}});
  layout::Layout layout;
  std::vector<std::string> assumptions;
  fill_strategy(row, software_of_run(row, machine), layout, assumptions);
  EXPECT_EQ(layout.zero, 1);
}

TEST(PlanFile, ReadsBackAsATrainingConfiguration) {
  SearchRequest request;
  request.spec = model::preset("llama3-8b");
  request.machine = machine::Machine::of("h100");
  request.devices = 16;
  Candidate candidate;
  candidate.layout.dp = 8, candidate.layout.tp = 2, candidate.layout.zero = 1, candidate.layout.micro_batch = 2, candidate.layout.global_batch = 256;
  const auto known = [](const std::string& key) { return config::find_field(key) != nullptr; };
  const std::string text = plan_toml(request, candidate, known);
  Findings findings;
  const config::RunConfig run = config::parse(text, "plan.toml", findings);
  EXPECT_TRUE(findings.empty()) << text;
  EXPECT_EQ(run.model.preset, "llama3-8b");
  EXPECT_EQ(run.train.global_batch, 256);
  EXPECT_EQ(run.train.micro_batch, 2);
  EXPECT_EQ(run.layout.dp, 8);
  EXPECT_EQ(run.parallel.zero, 1);
  EXPECT_NE(text.find("tp = 2"), std::string::npos);  // a key or, while the runtime has none, a comment
}

}  // namespace
}  // namespace weft::plan
