// weft train and weft generate as a user runs them: real processes, real ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "tests/support/command.h"

namespace weft {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::weft::testing::CommandResult;
using ::weft::testing::read_file;
using ::weft::testing::run_command;
using ::weft::testing::TempDir;
using ::weft::testing::weft_command;

// Within the rules of the configuration, and yet too much for any model.
const std::string kDiverging = "--set optimizer.name=sgd --set optimizer.lr=100 --set optimizer.momentum=0.99 --set optimizer.clip_norm=0 "
                               "--set schedule.warmup=0 --set train.steps=200";

/// A folder with token files and a configuration of a model that trains in seconds.
class TrainCommand : public ::testing::Test {
 protected:
  void SetUp() override {
    std::ofstream text(dir_ / "text");
    for (int i = 0; i < 600; ++i) text << "the quick brown fox " << i << " jumps over the lazy dog\n";
    text.close();
    ASSERT_EQ(weft_command("data prepare " + (dir_ / "text") + " --out " + (dir_ / "data")).exit_code, 0);
    std::ofstream(dir_ / "run.toml") << "[model]\nlayers = 2\nhidden = 32\nheads = 2\n[data]\ntrain = '"
                                     << dir_ / "data/train.bin"
                                     << "'\nval = '" << dir_ / "data/val.bin"
                                     << "'\nseq = 32\n[train]\nsteps = 12\nglobal_batch = 8\n"
                                     << "eval_every = 5\n[schedule]\nwarmup = 2\n[optimizer]\nlr = 5e-3\n[run]\ndir = '"
                                     << dir_ / "run"
                                     << "'\n";
  }

  CommandResult train(int ranks, const std::string& arguments = "") const {
    const std::string train = "train " + (dir_ / "run.toml") + " " + arguments;
    return weft_command(ranks == 1 ? train : "run -n " + std::to_string(ranks) + " -- " + WEFT_BINARY + " " + train);
  }

  std::vector<nlohmann::json> lines(const std::string& name) const {
    std::vector<nlohmann::json> out;
    std::istringstream in(read_file(dir_ / ("run/" + name)));
    for (std::string line; std::getline(in, line);) out.push_back(nlohmann::json::parse(line));
    return out;
  }

  TempDir dir_;
};

TEST_F(TrainCommand, TwoRanksWriteTheRunFolderAndTheModelSpeaks) {
  const CommandResult result = train(2, "--set train.dtype=bf16 --set parallel.zero=3 --set train.ema=0.5");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("done after 12 steps"));

  const auto metrics = lines("metrics.jsonl");
  ASSERT_EQ(metrics.size(), 12u);
  for (const char* key :
       {"step", "loss", "val_loss", "tokens_per_s", "grad_norm", "lr", "tokens", "epoch", "step_s", "elapsed_s", "memory"}) {
    EXPECT_TRUE(metrics[0].contains(key)) << key;
  }
  EXPECT_EQ(metrics[11]["step"], 12);
  EXPECT_EQ(metrics[11]["tokens"], 12 * 8 * 32);
  EXPECT_TRUE(metrics[0]["val_loss"].is_null());
  EXPECT_TRUE(metrics[4]["val_loss"].is_number());
  EXPECT_LT(metrics[11]["val_loss"].get<double>(), metrics[4]["val_loss"].get<double>());
  EXPECT_LT(metrics[11]["loss"].get<double>(), metrics[0]["loss"].get<double>() - 0.5);
  EXPECT_GT(metrics[0]["grad_norm"].get<double>(), 0.0);
  const auto events = lines("events.jsonl");
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0]["event"], "start");
  EXPECT_EQ(events[0]["ranks"], 2);
  EXPECT_EQ(events[1]["event"], "finish");
  EXPECT_EQ(events[1]["reason"], "done");
  EXPECT_THAT(read_file(dir_ / "run/config.toml"), HasSubstr("vocab = 256"));

  const std::string generate = "generate " + (dir_ / "run") + " --prompt 'the ' --tokens 40 --seed 3";
  const CommandResult text = weft_command(generate);
  ASSERT_EQ(text.exit_code, 0) << text.err;
  EXPECT_EQ(text.out.substr(0, 4), "the ");
  EXPECT_EQ(text.out.size(), 4u + 40 + 1);
  EXPECT_EQ(weft_command(generate).out, text.out);
  const CommandResult averaged = weft_command(generate + " --ema");
  EXPECT_EQ(averaged.exit_code, 0) << averaged.err;
  EXPECT_EQ(averaged.out.size(), text.out.size());
  EXPECT_TRUE(metrics[4]["val_loss_ema"].is_number());
  EXPECT_EQ(weft_command("generate " + (dir_ / "data")).exit_code, 2);
}

TEST_F(TrainCommand, PipelineRanksWriteOneModelThatSpeaks) {
  const std::string settings = "--set model.tied_head=yes --set train.micro_batch=2 --set train.steps=6 --set train.eval_every=3 --set schedule.warmup=1 ";
  const CommandResult alone = train(1, settings + "--set run.overwrite=true");
  ASSERT_EQ(alone.exit_code, 0) << alone.err;
  const auto expected = lines("metrics.jsonl");
  const CommandResult dry = weft_command("train " + (dir_ / "run.toml") + " --set layout.pp=2 --dry-run --set run.dir=" + (dir_ / "other"));
  EXPECT_EQ(dry.exit_code, 2);  // on one rank
  const CommandResult result = train(3, settings + "--set run.overwrite=true --set layout.pp=3 --set parallel.schedule=zb-h1 --set train.ema=0.5");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("pipeline zb-h1: bubble "), HasSubstr("% measured"), HasSubstr("% planned")));
  const auto metrics = lines("metrics.jsonl");
  ASSERT_EQ(metrics.size(), expected.size());
  for (size_t i = 0; i < metrics.size(); ++i) {
    EXPECT_NEAR(metrics[i]["loss"].get<double>(), expected[i]["loss"].get<double>(), 1e-4);
    EXPECT_NEAR(metrics[i]["grad_norm"].get<double>(), expected[i]["grad_norm"].get<double>(), 1e-3);
    EXPECT_EQ(metrics[i]["val_loss"].is_null(), expected[i]["val_loss"].is_null());
    const auto number = [](const nlohmann::json& value) { return value.is_number() ? value.get<double>() : 0.0; };
    EXPECT_NEAR(number(metrics[i]["val_loss"]), number(expected[i]["val_loss"]), 1e-4);
    EXPECT_GE(metrics[i]["bubble"].get<double>(), 0.0);
    EXPECT_LT(metrics[i]["bubble"].get<double>(), 1.0);
  }
  const CommandResult text = weft_command("generate " + (dir_ / "run") + " --prompt 'the ' --tokens 10 --seed 3");
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_EQ(text.out.size(), 4u + 10 + 1);
  EXPECT_THAT(weft_command("rehearse " + (dir_ / "run.toml") + " --set layout.pp=2 --world 2").err, HasSubstr("rehearsals of pipelines"));
}

TEST_F(TrainCommand, AnEarlierRunIsNotOverwrittenUnasked) {
  ASSERT_EQ(train(1, "--set train.steps=2").exit_code, 0);
  const CommandResult again = train(2, "--set train.steps=2");
  EXPECT_EQ(again.exit_code, 2);
  EXPECT_THAT(again.err, HasSubstr("holds an earlier run"));
  EXPECT_EQ(train(1, "--set train.steps=3 --set run.overwrite=true").exit_code, 0);
  EXPECT_EQ(lines("metrics.jsonl").size(), 3u);
}

TEST_F(TrainCommand, AFailedOverwriteLosesNothingAndASuccessCleansUp) {
  ASSERT_EQ(train(1, "--set train.steps=2").exit_code, 0);
  const std::string weights = read_file(dir_ / "run/model.safetensors");
  ASSERT_FALSE(weights.empty());
  EXPECT_EQ(train(1, "--set run.overwrite=true " + kDiverging).exit_code, 2);
  EXPECT_EQ(read_file(dir_ / "run/model.safetensors.earlier"), weights);
  EXPECT_EQ(train(1, "--set run.overwrite=true --set train.steps=3").exit_code, 0);
  EXPECT_FALSE(std::filesystem::exists(dir_ / "run/model.safetensors.earlier"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "run/metrics.jsonl.earlier"));
}

TEST_F(TrainCommand, WeightsOfUnknownOriginAreNotReplaced) {
  std::filesystem::create_directories(dir_ / "run");
  std::ofstream(dir_ / "run/model.safetensors") << "precious";
  const CommandResult result = train(1);
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("holds an earlier run (model.safetensors)"));
  EXPECT_EQ(train(1, "--dry-run").exit_code, 2);
  EXPECT_EQ(read_file(dir_ / "run/model.safetensors"), "precious");
}

TEST_F(TrainCommand, ARestartedAttemptTakesOverItsFolder) {
  ASSERT_EQ(train(1, "--set train.steps=2").exit_code, 0);
  const std::string again = "TORCHELASTIC_RESTART_COUNT=1 " + std::string(WEFT_BINARY) + " train " + (dir_ / "run.toml") + " --set train.steps=3";
  const CommandResult result = run_command(again);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(lines("metrics.jsonl").size(), 3u);
}

TEST_F(TrainCommand, TwoRunsInOneFolderAreKeptApart) {
  const std::string run = dir_ / "run";
  const std::string train = std::string(WEFT_BINARY) + " train " + (dir_ / "run.toml") + " --set run.overwrite=true";
  const CommandResult result = run_command(train + " --set train.steps=1000000 & pid=$!; until [ -s " + run +
                                           "/metrics.jsonl ]; do kill -0 $pid || exit 99; sleep 0.05; done; " + train +
                                           "; code=$?; kill -TERM $pid; wait $pid || exit 98; exit $code");
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_THAT(result.err, HasSubstr("another process is writing a run"));
}

TEST_F(TrainCommand, ADamagedTokenFileIsFoundBeforeTheRun) {
  std::fstream file(dir_ / "data/train.bin", std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(500);
  file << "####";
  file.close();
  const CommandResult result = train(1, "--dry-run");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("checksum"));
}

TEST_F(TrainCommand, AFolderIsNoConfiguration) {
  const CommandResult result = weft_command("train " + dir_.path());
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("is a folder"));
}

TEST_F(TrainCommand, MistakesInTheConfigurationAreNamedTogether) {
  std::ofstream(dir_ / "run.toml", std::ios::app) << "[layout]\nbackened = 'local'\n";
  const CommandResult result = train(1, "--set train.step=3 --set train.dtype=fp8");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, AllOf(HasSubstr("run.toml:20 layout.backened: unknown key"), HasSubstr("did you mean layout.backend?")));
  EXPECT_THAT(result.err, HasSubstr("did you mean train.steps?"));
  EXPECT_THAT(result.err, HasSubstr("\"fp8\" is none of fp64, fp32, bf16"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "run"));
}

TEST_F(TrainCommand, DryRunShowsSizesAndTrainsNothing) {
  const CommandResult result = train(2, "--dry-run --set train.micro_batch=3");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("256 tokens = 8 samples = 2 ranks x 4 samples in 2 forward passes of at most 3"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "run"));
  const CommandResult json = train(1, "--dry-run --json");
  EXPECT_EQ(nlohmann::json::parse(json.out)["tokens_per_step"], 256);
  const CommandResult uneven = train(3, "--dry-run");
  EXPECT_EQ(uneven.exit_code, 2);
  EXPECT_THAT(uneven.err, HasSubstr("nearest: 6 and 9"));
}

TEST_F(TrainCommand, ExplainedConfigurationIsAConfiguration) {
  const CommandResult explained = weft_command("train --explain-config");
  EXPECT_EQ(explained.exit_code, 0);
  EXPECT_THAT(explained.out, HasSubstr("# samples per update over all ranks"));
  std::ofstream(dir_ / "all.toml") << explained.out;
  const CommandResult result = weft_command(
      "train " + (dir_ / "all.toml") +
      " --dry-run --set model.preset=llama-tiny --set data.seq=64 --set data.train=" + (dir_ / "data/train.bin"));
  EXPECT_EQ(result.exit_code, 0) << result.err;
}

TEST_F(TrainCommand, DivergenceIsAnErrorThatNamesTheStep) {
  const CommandResult result = train(1, kDiverging);
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, ::testing::ContainsRegex("step [0-9]+: the (loss|gradient norm) is -?(nan|inf)"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "run/model.safetensors"));
  EXPECT_EQ(lines("events.jsonl").back()["event"], "failure");
}

// The signal arrives when the third step is in the metrics; every rank stops after one and the same step.
TEST_F(TrainCommand, MemoryIsShownByRankAndCategory) {
  const CommandResult one = train(2, "--set train.steps=2");
  ASSERT_EQ(one.exit_code, 0) << one.err;
  EXPECT_THAT(one.out, AllOf(HasSubstr("peak memory"), HasSubstr("activations")));
  const CommandResult all = train(2, "--memory --set train.steps=2 --set run.overwrite=true");
  EXPECT_THAT(all.out, AllOf(HasSubstr("\nrank 0 "), HasSubstr("\nrank 1 ")));
  EXPECT_EQ(lines("events.jsonl").back()["memory"].size(), 2u);
  EXPECT_GT(lines("metrics.jsonl")[1]["memory"]["optimizer"], 0);
}

TEST_F(TrainCommand, OutOfMemoryEndsWithTheTableAndTheLargestLever) {
  for (const int ranks : {1, 2}) {
    const CommandResult result = train(ranks, "--set train.memory_limit_gb=0.0015 --set train.global_batch=64 --set run.overwrite=true");
    EXPECT_EQ(result.exit_code, 2) << result.err;
    EXPECT_THAT(result.err, AllOf(HasSubstr("out of memory: no room for"), HasSubstr("of activations"),
                                  HasSubstr("held and asked for"), HasSubstr("Largest lever: train.micro_batch = ")));
    EXPECT_EQ(lines("events.jsonl").back()["event"], "failure");
  }
  const std::string deep = "--set train.memory_limit_gb=0.003 --set model.layers=8 --set run.overwrite=true";
  EXPECT_THAT(train(1, deep).err, HasSubstr("Largest lever: train.recompute = \"full\" (now none)"));
  EXPECT_THAT(train(1, deep + " --set train.recompute=full").err, Not(HasSubstr("Largest lever: train.recompute")));
}

TEST_F(TrainCommand, RehearsalTellsMemoryAndTrafficOfAnyRank) {
  const std::string rehearse = "rehearse " + (dir_ / "run.toml");
  const auto wide = nlohmann::json::parse(weft_command(rehearse + " --world 64 --rank 63 --set train.global_batch=64 --set parallel.zero=3 --json").out);
  const auto alone = nlohmann::json::parse(weft_command(rehearse + " --set train.global_batch=1 --json").out);
  EXPECT_LT(wide["kept"]["optimizer"].get<double>(), alone["kept"]["optimizer"].get<double>() / 32);
  EXPECT_GT(wide["per_step"]["all_gather"]["sent"].get<double>(), 0);
  EXPECT_FALSE(alone.contains("per_step"));
  EXPECT_THAT(weft_command(rehearse).out, AllOf(HasSubstr("rank 0 of 1"), HasSubstr("peak"), HasSubstr("allocations")));
  const auto cut = nlohmann::json::parse(weft_command(rehearse + " --world 2 --rank 1 --set layout.tp=2 --set train.global_batch=1 --json").out);
  EXPECT_LT(cut["kept"]["parameters"].get<double>(), 0.6 * alone["kept"]["parameters"].get<double>());
  EXPECT_EQ(cut["per_step"]["all_reduce"]["calls"], 2 * 4 + 3) << "two blocks, the embedding, the head's entry and the gradient norm";
  const CommandResult wrong = weft_command(rehearse + " --world 2 --rank 5");
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_THAT(wrong.err, HasSubstr("rank 5 of a world of 2"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "run")) << "a rehearsal writes nothing";
}

TEST_F(TrainCommand, VerifyComparesLayoutsAndSaysByItsExitCodeWhetherTheyAgree) {
  const std::string verify = "verify " + (dir_ / "run.toml") + " --steps 2 --set train.global_batch=4 --layouts ";
  const CommandResult good = weft_command(verify + "\"dp=2; tp=2\"");
  EXPECT_EQ(good.exit_code, 0) << good.out << good.err;
  EXPECT_THAT(good.out, AllOf(HasSubstr("dp=2"), HasSubstr("tp=2"), HasSubstr("ok"), HasSubstr("tolerance 1e-10")));
  const CommandResult strict = weft_command(verify + "tp=2 --json --tolerance 1e-300");
  EXPECT_EQ(strict.exit_code, 1) << strict.out << strict.err;
  const auto report = nlohmann::json::parse(strict.out);
  EXPECT_FALSE(report["ok"]);
  EXPECT_THAT(report["layouts"][0]["first"].get<std::string>(), HasSubstr("gradient of tok.weight"));
  const CommandResult wrong = weft_command(verify + "tq=2");
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_THAT(wrong.err, HasSubstr("tq"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "run")) << "nothing is written";
}

// The model states do not fit, and each rank keeps all of them: a part would do.
TEST_F(TrainCommand, PredictedStandsBesideMeasured) {
  std::ofstream(dir_ / "machine.toml") << "[machine]\nname = 'test'\ndevices = 3\ncores = 1\nmemory_gib = 4.0\nmemory_gbps = 5.0\n"
                                          "matmul_fp32_gflops = 50.0\nmatmul_bf16_gflops = 50.0\nlink_gbps = 2.0\noperation_us = 2.0\n";
  const std::string usual = "--set train.global_batch=12 --set run.overwrite=true --machine " + (dir_ / "machine.toml");
  const std::regex peak(R"(peak memory +[\d.]+ \w+ +[\d.]+ \w+ +([+-][\d.]+)%)"), step(R"(step +[\d.]+ \w+ +[\d.]+ \w+ +[+-][\d.]+%)");
  for (const auto& [ranks, change] : {std::pair{1, ""}, {3, "--set parallel.zero=1"}, {2, "--set train.micro_batch=2 --set train.dtype=bf16"}}) {
    const CommandResult result = train(ranks, usual + " " + change);
    ASSERT_EQ(result.exit_code, 0) << result.err;
    std::smatch found;
    ASSERT_TRUE(std::regex_search(result.out, found, peak)) << result.out;
    EXPECT_LE(std::abs(std::stod(found[1])), 1) << ranks << " ranks " << change;
    EXPECT_TRUE(std::regex_search(result.out, step)) << result.out;
  }
  const auto report = nlohmann::json::parse(train(1, usual + " --json").out);
  EXPECT_NEAR(report["predicted"]["peak_bytes"].get<double>() / report["measured"]["peak_bytes"].get<double>(), 1, 0.01);
  EXPECT_GT(report["predicted"]["step_s"].get<double>(), 0);
  EXPECT_GT(report["measured"]["step_s"].get<double>(), 0);
  EXPECT_EQ(train(1, "--set run.overwrite=true --machine /nonexistent.toml").exit_code, 2);
  // fp64 has no measured rates: said, not guessed.
  EXPECT_THAT(train(1, usual + " --set train.dtype=fp64").out, HasSubstr("no time predicted"));
}

TEST_F(TrainCommand, RunsWhatThePlannerChose) {
  std::ofstream(dir_ / "machine.toml") << "[machine]\nname = 'test'\ndevices = 2\ncores = 1\nmemory_gib = 4.0\nmemory_gbps = 5.0\nmatmul_fp32_gflops = 50.0\nlink_gbps = 2.0\n";
  const std::string plan = dir_ / "plan.toml", file = dir_ / "run.toml";
  const std::string text = read_file(file);
  std::ofstream(file) << "[layout]\nbucket_mb = 3\n[parallel]\nzero = 0\n" << text.substr(0, text.find("layers")) << "vocab = 256\n" << text.substr(text.find("layers"));
  const CommandResult chosen = weft_command("plan --config " + file + " --devices 2 --zero 2 --micro-batch 2 --tp 1 --pp 1 --machine " + (dir_ / "machine.toml") + " --out " + plan);
  ASSERT_EQ(chosen.exit_code, 0) << chosen.err;
  const CommandResult result = train(2, "--plan " + plan);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const std::string used = read_file(dir_ / "run/config.toml");
  for (const char* line : {"zero = 2", "micro_batch = 2", "bucket_mb = 3", "hidden = 32", "dp = 2"}) EXPECT_THAT(used, HasSubstr(line));
  // What the runtime has no key for is refused, not dropped; so is another number of ranks.
  std::ofstream(plan, std::ios::app) << "# pp = 2   (no key of weft train)\n";
  const CommandResult refused = train(2, "--set run.overwrite=true --plan " + plan);
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.err, HasSubstr("pp = 2 is not built into weft train"));
}

TEST_F(TrainCommand, OutOfMemoryForStatesPointsToTheDial) {
  const std::string small = "--set train.memory_limit_gb=0.0004 --set train.global_batch=2 --set data.seq=4 --set run.overwrite=true";
  const CommandResult result = train(2, small);
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_THAT(result.err, HasSubstr("Largest lever: parallel.zero = 3 (now 0): every rank keeps a part"));
  EXPECT_THAT(train(2, small + " --set parallel.zero=3").err, Not(HasSubstr("Largest lever: parallel.zero")));
}

// Before the ranks are up, while they load libtorch and meet, and once they have handlers: the signal ends them by itself, or after
// a step.
TEST_F(TrainCommand, ASignalInTheFirstSecondEndsAllRanks) {
  const std::string logs = dir_ / "logs";
  for (const std::string& moment : {logs, logs + "/rank-1.log", std::string(dir_ / "run/events.jsonl")}) {
    const CommandResult result = run_command(
        "rm -rf " + logs + " " + (dir_ / "run") + "; " + WEFT_BINARY + " run -n 2 --log-dir " + logs + " -- " + WEFT_BINARY + " train " +
        (dir_ / "run.toml") + " --set train.steps=1000000 & pid=$!; until [ -e " + moment +
        " ]; do kill -0 $pid || exit 99; sleep 0.01; done; kill -TERM $pid; wait $pid");
    if (result.exit_code == 0) {
      EXPECT_THAT(result.out, HasSubstr("stopped after")) << moment;
    } else {
      EXPECT_EQ(result.exit_code, 128 + SIGTERM) << moment << ": " << result.err;
      EXPECT_THAT(result.err, HasSubstr("was killed by signal 15 (SIGTERM)")) << moment;
    }
  }
}

TEST_F(TrainCommand, SignalEndsTheRunAfterAStepAndSavesTheWeights) {
  for (const char* signal : {"TERM", "INT"}) {
    const std::string run = dir_ / "run";
    const std::string train = std::string(WEFT_BINARY) + " train " + (dir_ / "run.toml") +
                              " --set train.steps=1000000 --set run.overwrite=true";
    const CommandResult result = run_command(
        "rm -rf " + run + "; " + train + " & pid=$!; until [ \"$(cat " + run +
        "/metrics.jsonl 2>/dev/null | wc -l)\" -ge 3 ]; do kill -0 $pid || exit 99; sleep 0.05; done; kill -" + signal +
        " $pid; wait $pid");
    EXPECT_EQ(result.exit_code, 0) << signal << ": " << result.err;
    EXPECT_THAT(result.out, HasSubstr("stopped after"));
    EXPECT_TRUE(std::filesystem::exists(dir_ / "run/model.safetensors"));
    EXPECT_EQ(lines("events.jsonl").back()["reason"], "stopped");
    EXPECT_EQ(lines("events.jsonl").back()["steps"], lines("metrics.jsonl").size());
  }
}

}  // namespace
}  // namespace weft
