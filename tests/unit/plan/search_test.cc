#include <gtest/gtest.h>

#include <set>

#include "weft/core/error.h"
#include "weft/model/presets.h"
#include "weft/plan/export.h"
#include "weft/plan/report.h"
#include "weft/plan/search.h"

namespace weft::plan {
namespace {

SearchRequest request_of(const char* preset, int64_t devices, int64_t batch, int64_t sequence) {
  SearchRequest request;
  request.spec = model::preset(preset);
  request.machine = machine::Machine::of("h100");
  request.devices = devices;
  request.global_batch = batch;
  request.sequence = sequence;
  return request;
}

TEST(Search, EveryRankedLayoutIsLegalFitsAndIsSorted) {
  const SearchRequest request = request_of("llama3-70b", 64, 256, 8192);
  const SearchResult result = search(request, {});
  ASSERT_FALSE(result.ranked.empty());
  double before = 0;
  for (const Candidate& candidate : result.ranked) {
    EXPECT_TRUE(layout::check(candidate.layout, request.spec).empty()) << candidate.layout.text();
    EXPECT_EQ(candidate.layout.devices(), 64);
    EXPECT_GE(candidate.memory.fit_probability, request.fit_probability);
    EXPECT_GE(candidate.time.step, before);
    before = candidate.time.step;
  }
  EXPECT_GT(result.considered, result.fitting);
}

TEST(Search, ASmallModelNeedsNothingButDataParallel) {
  const SearchResult result = search(request_of("gpt2", 8, 512, 1024), {});
  EXPECT_EQ(result.ranked.front().layout.tp, 1);
  EXPECT_EQ(result.ranked.front().layout.pp, 1);
}

TEST(Search, ALargeModelIsDivided) {
  const SearchResult result = search(request_of("llama3-70b", 64, 256, 8192), {});
  const layout::Layout& best = result.ranked.front().layout;
  EXPECT_TRUE(best.tp * best.pp > 1 || best.zero == 3);
  for (const Rejection& rejection : result.rejected) {
    EXPECT_GT(rejection.over_gib, 0) << rejection.layout.text();
    EXPECT_NE(rejection.reason.find("over by"), std::string::npos);
  }
}

TEST(Search, ParetoFrontGivesSpeedForMemory) {
  const SearchResult result = search(request_of("llama3-70b", 64, 256, 8192), {});
  for (size_t i = 1; i < result.pareto.size(); ++i) {
    EXPECT_GT(result.pareto[i].time.step, result.pareto[i - 1].time.step);
    EXPECT_LT(result.pareto[i].memory.device(), result.pareto[i - 1].memory.device());
  }
}

TEST(Search, NothingFitsSaysWhy) {
  const SearchRequest request = request_of("llama3.1-405b", 8, 8, 8192);
  const SearchResult result = search(request, {});
  EXPECT_TRUE(result.ranked.empty());
  const std::vector<std::string> words = explain(request, result, {});
  EXPECT_NE(words.front().find("Nothing fits"), std::string::npos);
  EXPECT_NE(words.back().find("over by"), std::string::npos);
  EXPECT_NE(words[1].find("devices are enough"), std::string::npos) << words[1];
}

TEST(Search, ImpossibleRequestsAreFindings) {
  SearchRequest request = request_of("llama3-8b", 0, 8, 8192);
  EXPECT_THROW(search(request, {}), ConfigError);
  request = request_of("llama3-8b", 8, 8, 8192);
  request.tp = {3};
  try {
    search(request, {});
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("2 or 4"), std::string::npos) << error.what();
  }
  request = request_of("llama3-8b", 37, 5, 8192);  // a prime beyond the layers that does not divide the batch
  EXPECT_THROW(search(request, {}), ConfigError);
}

TEST(Search, ConstraintsAreKept) {
  SearchRequest request = request_of("llama3-8b", 16, 128, 8192);
  request.tp = {4};
  request.zero = {1};
  for (const Candidate& candidate : search(request, {}).ranked) {
    EXPECT_EQ(candidate.layout.tp, 4);
    EXPECT_EQ(candidate.layout.zero, 1);
  }
}

TEST(Search, SchedulesAreSearchedAndKept) {
  SearchRequest request = request_of("llama3-70b", 64, 64, 8192);
  request.pp = {4};
  std::set<std::string> seen;
  for (const Candidate& candidate : search(request, {}).ranked) seen.insert(candidate.layout.schedule);
  EXPECT_GE(seen.size(), 2u);
  request.schedules = {"1f1b"};
  for (const Candidate& candidate : search(request, {}).ranked) EXPECT_EQ(candidate.layout.schedule, "1f1b");
  request.schedules = {"zb-h9"};
  EXPECT_THROW(search(request, {}), ConfigError);
}

// 8B parameters with fp32 gradients and Adam are 145 GB: on one device of 80 only with the optimizer in host memory, and
// then only as long as weights and gradients fit.
TEST(Search, WhatDoesNotFitIsTriedWithTheOptimizerOnTheHost) {
  SearchRequest request = request_of("llama3-8b", 1, 8, 4096);
  request.tp = {1};
  const SearchResult with = search(request, {});
  ASSERT_FALSE(with.ranked.empty());
  EXPECT_TRUE(with.ranked.front().layout.offload);
  EXPECT_EQ(with.ranked.front().memory.optimizer, 0);
  std::string all;
  for (const std::string& line : explain(request, with, {})) all += line + "\n";
  EXPECT_NE(all.find("offload: optimizer state"), std::string::npos) << all;
  request.offload = false;
  EXPECT_TRUE(search(request, {}).ranked.empty());
  // Where it fits without, nothing is offloaded: the host's step is slower.
  for (const Candidate& candidate : search(request_of("gpt2", 8, 512, 1024), {}).ranked) EXPECT_FALSE(candidate.layout.offload);
  Job job;
  job.model = ModelSummary::of(request.spec, 4096);
  job.machine = request.machine;
  job.sequence = 4096;
  const double device = step_time(job, {}).optimizer;
  job.layout.offload = true;
  EXPECT_GT(step_time(job, {}).optimizer, 10 * device);
}

// 8B parameters are 120 GiB of fp32 state and gradients on the host.
TEST(Search, OffloadsOnlyWhatTheHostHolds) {
  SearchRequest request = request_of("llama3-8b", 1, 8, 4096);
  request.tp = {1};
  request.machine.host_memory_gib = 140;
  const SearchResult holds = search(request, {});
  ASSERT_FALSE(holds.ranked.empty());
  EXPECT_NEAR(holds.ranked.front().memory.host / 8030261248.0, 16, 1e-4);
  request.machine.host_memory_gib = 130;  // a tenth is the system's
  const SearchResult short_of_it = search(request, {});
  EXPECT_TRUE(short_of_it.ranked.empty());
  EXPECT_TRUE(short_of_it.host_short);
  std::string all;
  for (const std::string& line : explain(request, short_of_it, {})) all += line + "\n";
  EXPECT_NE(all.find("130 GiB of a node's host"), std::string::npos) << all;
}

TEST(Search, TheBestPipelinesAreSimulated) {
  SearchRequest request = request_of("llama3-70b", 64, 64, 8192);
  request.pp = {4, 8};
  const SearchResult result = search(request, {});
  ASSERT_GT(result.simulated, 20);
  EXPECT_TRUE(result.ranked.front().simulated);
  Job job;
  job.model = ModelSummary::of(request.spec, request.sequence);
  job.machine = request.machine;
  job.sequence = request.sequence;
  bool moved = false;
  for (const Candidate& candidate : result.ranked) {
    if (!candidate.simulated) continue;
    job.layout = candidate.layout;
    const double closed = step_time(job, {}).step;
    EXPECT_NEAR(candidate.time.step / closed, 1, 0.25) << candidate.layout.text();
    moved = moved || std::abs(candidate.time.step / closed - 1) > 1e-3;
    const Time& t = candidate.time;
    EXPECT_NEAR((t.gemm + t.attention + t.memory + t.host + t.recompute + t.tp + t.cp + t.ep + t.pp + t.dp + t.bubble + t.optimizer + t.fixed) / t.step, 1, 1e-9);
  }
  EXPECT_TRUE(moved);
  request.simulate_actions = 0;
  EXPECT_EQ(search(request, {}).simulated, 0);
}

TEST(Search, ExpertsAreSpread) {
  const SearchRequest request = request_of("mixtral-8x7b", 64, 256, 4096);
  std::set<int64_t> degrees;
  for (const Candidate& candidate : search(request, {}).ranked) degrees.insert(candidate.layout.ep);
  EXPECT_GT(degrees.size(), 1u);
}

TEST(Explain, SaysWhatEachAxisCosts) {
  const SearchRequest request = request_of("llama3-70b", 64, 256, 8192);
  const SearchResult result = search(request, {});
  std::string all;
  for (const std::string& line : explain(request, result, {})) all += line + "\n";
  EXPECT_NE(all.find("must be divided"), std::string::npos) << all;
  const Json json = search_json(request, result, {}, sensitivity(request, result, {}), 3);
  EXPECT_EQ(json["ranked"].size(), 3u);
  EXPECT_GE(json["sensitivity"].size(), 2u);
}

TEST(Export, FlagsOfOtherPrograms) {
  const SearchRequest request = request_of("llama3-70b", 64, 256, 8192);
  Candidate candidate;
  candidate.layout.tp = 4, candidate.layout.pp = 4, candidate.layout.chunks = 5, candidate.layout.cp = 2, candidate.layout.dp = 2, candidate.layout.zero = 1, candidate.layout.global_batch = 256;
  candidate.layout.sequence_parallel = true;
  const std::string megatron = export_flags("megatron", request, candidate);
  for (const char* flag : {"--tensor-model-parallel-size 4", "--num-layers-per-virtual-pipeline-stage 4", "--context-parallel-size 2", "--use-distributed-optimizer", "--num-query-groups 8", "--sequence-parallel"})
    EXPECT_NE(megatron.find(flag), std::string::npos) << flag << "\n" << megatron;
  EXPECT_THROW(export_flags("torchtitan", request, candidate), ConfigError);  // no ZeRO-1 there
  candidate.layout.zero = 3, candidate.layout.pp = 1, candidate.layout.chunks = 1, candidate.layout.dp = 8;
  EXPECT_NE(export_flags("torchtitan", request, candidate).find("data_parallel_shard_degree=8"), std::string::npos);
  EXPECT_THROW(export_flags("slurm", request, candidate), ConfigError);
  candidate.layout.schedule = "zb-h1";
  EXPECT_THROW(export_flags("megatron", request, candidate), ConfigError);
}

}  // namespace
}  // namespace weft::plan
