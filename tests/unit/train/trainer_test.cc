// The trainer on real ranks (threads of this process).
#include "weft/train/trainer.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>

#include "tests/support/command.h"
#include "tests/support/ranks.h"
#include "tests/support/tolerances.h"
#include "weft/checkpoint/safetensors.h"
#include "weft/core/error.h"
#include "weft/data/token_file.h"
#include "weft/train/evaluate.h"
#include "weft/train/weights.h"

namespace weft::train {
namespace {

using ::testing::HasSubstr;
using ::weft::testing::on_threads;
using ::weft::testing::read_file;
using ::weft::testing::TempDir;

/// Ids of which each follows from the one before, most of the time.
void write_tokens(const std::string& path, int64_t count, uint32_t seed) {
  data::TokenWriter writer(path, 64, "bytes");
  std::vector<uint32_t> tokens;
  for (uint32_t i = 0; i < count; ++i) tokens.push_back((i * 5 + i / 11 + seed) % 64);
  writer.append(tokens);
  writer.finish();
}

struct Outcome {
  RunResult result;
  std::vector<double> losses, val_losses, val_losses_ema, norms;
  std::string weight_file, averages_file;
  std::string weights;  ///< bytes of model.safetensors
};

class Trainer : public ::testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);  // ranks are threads already
    write_tokens(dir_ / "train.bin", 2000, 1);
    write_tokens(dir_ / "val.bin", 8 * 23 + 1, 5);  // 23 samples: no number of ranks divides them
    config_.model.layers = 2;
    config_.model.hidden = 16;
    config_.model.heads = 2;
    config_.data.train = dir_ / "train.bin";
    config_.data.val = dir_ / "val.bin";
    config_.data.seq = 8;
    config_.train.steps = 20;
    config_.train.global_batch = 12;
    config_.train.dtype = "fp64";
    config_.train.eval_every = 7;
    config_.optimizer.lr = 1e-2;
  }

  Outcome run_on(int ranks, const config::RunConfig& config, const RunHooks& extra = {},
                 BackendKind backend = BackendKind::local) {
    Outcome outcome;
    config::RunConfig mine = config;
    mine.run.dir = dir_ / ("run" + std::to_string(++runs_));
    std::mutex mutex;
    on_threads(ranks, [&](World& world) {
      RunHooks hooks = extra;
      hooks.on_step = [&](const StepRecord& record) {
        outcome.losses.push_back(record.loss);
        outcome.norms.push_back(record.grad_norm);
        if (record.val_loss) outcome.val_losses.push_back(*record.val_loss);
        if (record.val_loss_ema) outcome.val_losses_ema.push_back(*record.val_loss_ema);
      };
      const RunResult result = run(mine, world, hooks);
      const std::lock_guard lock(mutex);
      outcome.result = result;
    }, backend);
    outcome.weight_file = mine.run.dir + "/model.safetensors";
    outcome.averages_file = mine.run.dir + "/model_ema.safetensors";
    outcome.weights = read_file(outcome.weight_file);
    return outcome;
  }

  static void expect_close(const std::vector<double>& a, const std::vector<double>& b, double tolerance,
                           const std::string& what) {
    ASSERT_EQ(a.size(), b.size()) << what;
    for (size_t i = 0; i < a.size(); ++i)
      EXPECT_LE(std::abs(a[i] - b[i]), tolerance * std::abs(b[i])) << what << " at " << i;
  }

  /// Every weight after the run, relative to the largest of its tensor.
  static void expect_close_weights(const Outcome& a, const Outcome& b, double tolerance, const std::string& what) {
    expect_close_files(a.weight_file, b.weight_file, tolerance, what);
    if (!a.val_losses_ema.empty()) expect_close_files(a.averages_file, b.averages_file, tolerance, what + ", averages");
  }
  static void expect_close_files(const std::string& a, const std::string& b, double tolerance, const std::string& what) {
    const checkpoint::SafetensorsFile left(a), right(b);
    ASSERT_EQ(left.names(), right.names()) << what;
    ASSERT_FALSE(left.names().empty());
    for (const std::string& name : right.names()) {
      const at::Tensor reference = right.tensor(name);
      // Softmax does not see a bias of the keys: its gradient is rounding, its weight stays near 0, and only that is compared.
      const at::Tensor scale = name.ends_with("attn.wk.bias") ? at::ones({}, at::kDouble) : reference.abs().max();
      const double error = ((left.tensor(name) - reference).abs().max() / scale).item<double>();
      EXPECT_LE(error, tolerance) << what << ", " << name;
    }
  }

  std::string error_of(int ranks, const config::RunConfig& config) {
    return error_of([&] { run_on(ranks, config); });
  }
  static std::string error_of(const std::function<void()>& fn) {
    try {
      fn();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }

  TempDir dir_;
  config::RunConfig config_;
  int runs_ = 0;
};

TEST_F(Trainer, TensorParallelRunsGiveTheOneRankResultAndFile) {
  const Outcome reference = run_on(1, config_);
  for (const bool sequence : {false, true}) {
    for (const int ranks : {2, 4}) {
      config::RunConfig config = config_;
      config.layout.tp = 2;
      config.parallel.sequence_parallel = sequence;
      config.parallel.zero = ranks == 2 ? 0 : sequence ? 3 : 1;
      const Outcome outcome = run_on(ranks, config);
      const std::string what = std::to_string(ranks) + " ranks" + (sequence ? ", sequence parallel" : "");
      expect_close(outcome.losses, reference.losses, testing::kFp64Parity, what);
      expect_close(outcome.norms, reference.norms, 1e-9, what);
      expect_close(outcome.val_losses, reference.val_losses, testing::kFp64Parity, what);
      expect_close_weights(outcome, reference, testing::kFp64Parity, what);
    }
  }
  config::RunConfig config = config_;
  config.layout.tp = 2;
  EXPECT_THAT(error_of(3, config), AllOf(HasSubstr("layout.tp"), HasSubstr("legal values: 1, 3")));
  config.layout.dp = 2;
  EXPECT_THAT(error_of(2, config), AllOf(HasSubstr("layout.dp"), HasSubstr("weft run -n 4")));
  config.layout = {.tp = 3};
  EXPECT_THAT(error_of(3, config), AllOf(HasSubstr("3 ranks cannot share out 2 query heads"), HasSubstr("1, 2")));
  config.layout.tp = 2;
  config.parallel.sequence_parallel = true;
  config.data.seq = 7;
  EXPECT_THAT(error_of(2, config), AllOf(HasSubstr("data.seq"), HasSubstr("6 and 8")));
  config = config_;
  config.layout.tp = 2;
  config.parallel.tp_overlap = 2;
  config.train.recompute = "half";
  EXPECT_THAT(error_of(2, config), AllOf(HasSubstr("train.recompute"), HasSubstr("tp_overlap")));
  config.layout.tp = 1;
  EXPECT_THAT(error_of(2, config), HasSubstr("nothing travels"));
}

TEST_F(Trainer, LossesDoNotDependOnRanksOrMicroBatch) {
  const Outcome reference = run_on(1, config_);
  ASSERT_EQ(reference.losses.size(), 20u);
  ASSERT_EQ(reference.val_losses.size(), 3u);  // steps 7, 14 and the last
  EXPECT_NEAR(reference.losses[0], std::log(64.0), 0.2);
  EXPECT_LT(reference.losses[19], reference.losses[0] - 0.3);
  for (const double norm : reference.norms) EXPECT_GT(norm, 1e-3);
  for (const int ranks : {1, 2, 3, 4}) {
    for (const int64_t micro : {1, 2, 4}) {
      config::RunConfig config = config_;
      config.train.micro_batch = micro;
      const Outcome outcome = run_on(ranks, config);
      const std::string what = std::to_string(ranks) + " ranks, micro-batch " + std::to_string(micro);
      expect_close(outcome.losses, reference.losses, testing::kFp64Parity, what);
      expect_close(outcome.norms, reference.norms, 1e-9, what);
      expect_close(outcome.val_losses, reference.val_losses, testing::kFp64Parity, what);
      expect_close_weights(outcome, reference, testing::kFp64Parity, what);
    }
  }
}

TEST_F(Trainer, GlooGivesTheSameRun) {
  config_.train.micro_batch = 2;
  const Outcome reference = run_on(1, config_);
  for (const int ranks : {2, 3, 4}) {
    const Outcome outcome = run_on(ranks, config_, {}, BackendKind::gloo);
    const std::string what = std::to_string(ranks) + " ranks over gloo";
    expect_close(outcome.losses, reference.losses, testing::kFp64Parity, what);
    expect_close_weights(outcome, reference, testing::kFp64Parity, what);
  }
}

TEST_F(Trainer, DropoutDoesNotDependOnRanksOrMicroBatch) {
  config_.model.dropout = 0.2;
  config_.train.steps = 6;
  const Outcome reference = run_on(1, config_);
  config_.train.micro_batch = 3;
  expect_close(run_on(2, config_).losses, reference.losses, testing::kFp64Parity, "dropout");
}

TEST_F(Trainer, EveryPositionOfTheDialGivesTheSameRun) {
  for (const char* family : {"llama", "gpt2"}) {  // an untied head, a Unit; and a tied one, which is not
    config_.model.family = family;
    config_.train.micro_batch = 2;
    config_.train.ema = 0.9;
    const Outcome reference = run_on(1, config_);
    ASSERT_EQ(reference.val_losses_ema.size(), 3u);
    EXPECT_LT(reference.val_losses_ema[2], reference.val_losses_ema[0]);
    EXPECT_NE(reference.val_losses_ema, reference.val_losses);
    struct Position {
      int zero, ranks, dp_shard = 0, reshard_group = 0;
    };
    for (const Position& p : {Position{1, 2}, {2, 3}, {3, 2}, {3, 4, 0, 2}, {1, 3, 1}, {3, 4, 2}}) {
      config_.parallel = {.zero = p.zero, .dp_shard = p.dp_shard, .reshard_group = p.reshard_group};
      const Outcome outcome = run_on(p.ranks, config_);
      const std::string what = fmt::format("{} zero {} on {} ranks, dp_shard {}", family, p.zero, p.ranks, p.dp_shard);
      expect_close(outcome.losses, reference.losses, testing::kFp64Parity, what);
      expect_close(outcome.norms, reference.norms, 1e-9, what);
      expect_close(outcome.val_losses, reference.val_losses, testing::kFp64Parity, what);
      expect_close(outcome.val_losses_ema, reference.val_losses_ema, testing::kFp64Parity, what);
      expect_close_weights(outcome, reference, testing::kFp64Parity, what);
    }
    config_.parallel = {};
  }
}

TEST_F(Trainer, ShardedFp32AndBf16FollowDataParallel) {
  for (const auto& [dtype, tolerance] : {std::pair{"fp32", testing::kFp32Losses}, {"bf16", 2e-2}}) {
    config_.train.dtype = dtype;
    const Outcome reference = run_on(2, config_);
    for (const int zero : {1, 2, 3}) {
      config::RunConfig config = config_;
      config.parallel.zero = zero;
      config.parallel.reshard_after_forward = zero != 3 || std::string(dtype) == "fp32";
      expect_close(run_on(2, config).losses, reference.losses, tolerance, std::string(dtype) + " zero " + std::to_string(zero));
    }
  }
}

TEST_F(Trainer, Fp32StaysWithinItsBound) {
  config_.train.dtype = "fp32";
  const Outcome reference = run_on(1, config_);
  for (const int ranks : {2, 3, 4}) {
    const Outcome outcome = run_on(ranks, config_);
    expect_close(outcome.losses, reference.losses, testing::kFp32Losses, "fp32");
    expect_close({outcome.losses[0]}, {reference.losses[0]}, testing::kFp32FirstLoss, "first step");
  }
}

/// A loss scale far too large at first: steps are skipped on all ranks until gradients fit, and the schedule waits for them.
TEST_F(Trainer, Fp16SkipsOverflowsAndThenLearns) {
  config_.train.dtype = "fp16";
  config_.train.loss_scale = 1e8;
  config_.train.steps = 30;
  config_.schedule.warmup = 4;
  for (const int ranks : {1, 2}) {
    std::vector<StepRecord> records;
    RunHooks hooks;
    config::RunConfig mine = config_;
    mine.run.dir = dir_ / ("fp16-" + std::to_string(ranks));
    hooks.on_step = [&](const StepRecord& record) { records.push_back(record); };
    on_threads(ranks, [&](World& world) { run(mine, world, hooks); });
    ASSERT_EQ(records.size(), 30u);
    ASSERT_TRUE(records[0].skipped);
    size_t first = 0;
    while (first < records.size() && records[first].skipped) ++first;
    ASSERT_LT(first, 25u);
    EXPECT_EQ(*records[0].loss_scale, 5e7);
    EXPECT_EQ(records[first].lr, records[0].lr) << "the schedule has not moved";
    EXPECT_EQ(records[first].loss_scale, records[first - 1].loss_scale);
    EXPECT_GT(records[first + 1].lr, records[first].lr);
    EXPECT_GT(records[first].grad_norm, 0.1);
    EXPECT_LT(records.back().loss, records[0].loss - 0.05);
  }
}

TEST_F(Trainer, GradientAndReduceDtypesAreUsed) {
  config_.train.dtype = "bf16";
  const Outcome usual = run_on(2, config_);
  config_.train.gradient_dtype = "bf16";
  const Outcome kept = run_on(2, config_);
  config_.train.gradient_dtype = "auto";
  config_.train.reduce_dtype = "bf16";
  const Outcome sent = run_on(2, config_);
  config_.parallel.zero = 3;
  const Outcome scattered = run_on(2, config_);
  for (const Outcome* outcome : {&kept, &sent, &scattered}) {
    EXPECT_NE(outcome->norms[3], usual.norms[3]);
    EXPECT_NEAR(outcome->losses.back(), usual.losses.back(), 0.05);
  }
  config_.train.dtype = "fp64";
  EXPECT_THROW(make_job(config_, 1), ConfigError);
}

TEST_F(Trainer, TwoRunsAreBitEqual) {
  for (const char* dtype : {"fp32", "bf16"}) {
    config_.train.dtype = dtype;
    config_.train.micro_batch = 2;
    const Outcome first = run_on(2, config_), second = run_on(2, config_);
    EXPECT_EQ(first.losses, second.losses);
    EXPECT_EQ(first.norms, second.norms);
    ASSERT_GT(first.weights.size(), 1000u);
    EXPECT_TRUE(first.weights == second.weights);
    EXPECT_LT(first.losses.back(), first.losses.front());
  }
}

TEST_F(Trainer, SeedChangesTheRun) {
  config_.train.steps = 2;
  const Outcome first = run_on(1, config_);
  config_.train.seed = 2;
  EXPECT_NE(run_on(1, config_).losses, first.losses);
}

TEST_F(Trainer, EvaluationSamplesAreCountedOnce) {
  config_.train.steps = 1;
  config_.train.micro_batch = 4;
  const double all = *run_on(1, config_).result.val_loss;
  for (const int ranks : {2, 3, 4}) EXPECT_NEAR(*run_on(ranks, config_).result.val_loss, all, 1e-12);
  config_.train.steps = 7;
  config_.train.eval_samples = 5;
  expect_close(run_on(3, config_).val_losses, run_on(1, config_).val_losses, 1e-12, "5 of 23 samples");
}

// Rank 1 alone is asked; both stop after the same step, and the weights are on disk.
TEST_F(Trainer, OneRanksWishToStopIsEveryones) {
  for (const int64_t wanted : {1, 5}) {
    std::atomic<int64_t> asked{0};
    config::RunConfig config = config_;
    config.run.dir = dir_ / ("stop" + std::to_string(wanted));
    std::array<RunResult, 2> results;
    on_threads(2, [&](World& world) {
      const bool me = world.rank() == 1;
      results[world.rank()] =
          run(config, world, {.stop_requested = [&, me] { return me && ++asked >= wanted; }, .on_step = {}});
    });
    for (const RunResult& result : results) {
      EXPECT_EQ(result.steps, wanted);
      EXPECT_TRUE(result.stopped);
    }
    EXPECT_TRUE(std::filesystem::exists(config.run.dir + "/model.safetensors"));
    EXPECT_THAT(read_file(config.run.dir + "/events.jsonl"), HasSubstr("\"reason\":\"stopped\""));
  }
}

TEST_F(Trainer, DivergenceNamesTheStepAndSavesNothing) {
  config_.train.dtype = "fp32";
  config_.optimizer.name = "sgd";
  config_.optimizer.lr = 1e30;  // beyond the rule for files, which is not asked here
  config_.optimizer.clip_norm = 0;
  EXPECT_THAT(error_of(2, config_), ::testing::ContainsRegex("step [0-9]+: the (loss|gradient norm) is -?(nan|inf)"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "run1/model.safetensors"));
  EXPECT_THAT(read_file(dir_ / "run1/events.jsonl"), HasSubstr("\"event\":\"failure\""));
}

TEST_F(Trainer, AnEarlierRunIsKept) {
  config_.train.steps = 1;
  config_.run.dir = dir_ / "kept";
  on_threads(1, [&](World& world) { run(config_, world); });
  int refused = 0;
  std::mutex mutex;
  on_threads(3, [&](World& world) {
    try {
      run(config_, world);
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr("holds an earlier run"));
      const std::lock_guard lock(mutex);
      ++refused;
    }
  });
  EXPECT_EQ(refused, 3);
}

TEST_F(Trainer, DifferentConfigurationsAreRefusedByAllRanks) {
  int refused = 0;
  std::mutex mutex;
  on_threads(3, [&](World& world) {
    config::RunConfig config = config_;
    config.run.dir = dir_ / "never";
    if (world.rank() == 2) config.optimizer.lr *= 2;
    try {
      run(config, world);
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr("configuration of rank 2 differs"));
      const std::lock_guard lock(mutex);
      ++refused;
    }
  });
  EXPECT_EQ(refused, 3);
}

TEST_F(Trainer, DataThatDoesNotFitIsRefused) {
  config::RunConfig config = config_;
  config.data.seq = 5000;
  EXPECT_THAT(error_of(1, config), HasSubstr("one sample of data.seq = 5000 needs 5001"));
  config = config_;
  data::TokenWriter other(dir_ / "other.bin", 99, "bytes");
  other.append(std::vector<uint32_t>(50, 1));
  other.finish();
  config.data.val = dir_ / "other.bin";
  EXPECT_THAT(error_of(1, config), HasSubstr("prepare both with one tokenizer"));
  config = config_;
  config.train.global_batch = 10;
  EXPECT_THAT(error_of(3, config), HasSubstr("nearest: 9 and 12"));
}

TEST_F(Trainer, SavedWeightsAreThoseOfTheLastStep) {
  config_.train.steps = 3;
  const data::TokenSamples val(data::TokenFile::open(dir_ / "val.bin"), config_.data.seq);
  EXPECT_THAT(error_of([&] { run_on(1, config_), load_run(dir_ / "run1", /*averaged=*/true); }), HasSubstr("train.ema = 0"));
  config_.train.ema = 0.8;
  const Outcome outcome = run_on(2, config_);
  TrainedModel trained = load_run(dir_ / "run2");
  EXPECT_EQ(trained.tokenizer, "bytes");
  EXPECT_NEAR(evaluate(trained.model, val, 0, 4, Comm()), *outcome.result.val_loss, 1e-12);
  TrainedModel averaged = load_run(dir_ / "run2", /*averaged=*/true);
  EXPECT_NEAR(evaluate(averaged.model, val, 0, 4, Comm()), *outcome.result.val_loss_ema, 1e-12);
  EXPECT_GT(std::abs(*outcome.result.val_loss_ema - *outcome.result.val_loss), 1e-6);
  std::filesystem::remove(dir_ / "run2/model.safetensors");
  EXPECT_THAT(error_of([&] { load_run(dir_ / "run2"); }), HasSubstr("writes it when it ends"));
}

// Every optimizer of a configuration: learns, gives one rank's losses on three, and follows rates by name.
TEST_F(Trainer, EveryOptimizerLearnsAndGivesOneRanksLosses) {
  config_.train.steps = 30;
  config_.schedule.name = "wsd";
  config_.model.hidden = 64;  // matrices above the least size of 8-bit moments
  int64_t zero = 0;
  for (const auto& [name, lr] : std::vector<std::pair<std::string, double>>{{"adam8bit", 1e-2}, {"lion", 1e-3}, {"adafactor", 1e-1}, {"muon", 1e-2}}) {
    config_.optimizer.name = name;
    config_.optimizer.lr = lr;
    config_.parallel.zero = 0;
    const Outcome one = run_on(1, config_);
    EXPECT_LT(one.losses.back(), 0.6 * one.losses.front()) << name;
    config_.parallel.zero = zero++ % 4;
    const Outcome three = run_on(3, config_);
    ASSERT_EQ(three.losses.size(), one.losses.size());
    for (size_t i = 0; i < one.losses.size(); ++i) EXPECT_NEAR(three.losses[i], one.losses[i], testing::kFp64Parity * one.losses[i]) << name << " step " << i;
  }
}

// A whole run with everything that may be elsewhere elsewhere, in replicas of shards: bit for bit the run without.
TEST_F(Trainer, OffloadChangesNothing) {
  config_.train.steps = 4;
  config_.train.dtype = "bf16";
  config_.train.global_batch = 8;
  const auto check = [&](int ranks, int64_t zero, int64_t dp_shard) {
    config_.parallel.zero = zero;
    config_.parallel.dp_shard = dp_shard;
    config_.offload = {};
    const Outcome plain = run_on(ranks, config_);
    EXPECT_NE(plain.losses.front(), plain.losses.back());
    for (const char* to : {"cpu", "nvme"}) {
      config_.offload = {.optimizer = to, .parameters = zero == 3 ? "cpu" : "none", .dir = to == std::string("nvme") ? dir_.path() : "", .buffer_mb = 0.01};
      const Outcome away = run_on(ranks, config_);
      EXPECT_EQ(away.losses, plain.losses) << to << ", zero " << zero << " on " << ranks;
      EXPECT_EQ(away.weights, plain.weights) << to << ", zero " << zero << " on " << ranks;
      EXPECT_EQ(away.result.offload.has_value(), to == std::string("nvme"));
    }
  };
  check(1, 0, 0);
  check(2, 1, 0);
  check(4, 2, 2);
  check(4, 3, 2);
}

TEST_F(Trainer, RatesByNameScaleTheSchedule) {
  config_.train.steps = 1;
  config_.schedule.warmup = 0;
  const auto weights = [&](const std::string& rates) {
    config_.optimizer.rates = rates;
    return checkpoint::SafetensorsFile(run_on(2, config_).weight_file);
  };
  const auto whole = weights(""), half = weights("tok.*=0.5; *=1"), none = weights("*=0");
  for (const std::string& name : whole.names()) {
    const at::Tensor moved = whole.tensor(name) - none.tensor(name), part = half.tensor(name) - none.tensor(name);
    EXPECT_GT(moved.abs().max().item<double>(), 0) << name;
    EXPECT_TRUE(at::allclose(part, moved * (name == "tok.weight" ? 0.5 : 1.0), 0, 1e-12)) << name;
  }
  config_.optimizer.rates = "layers.*.nrom.*=0.5";
  EXPECT_THAT(error_of(1, config_), HasSubstr("names no parameter"));
}

}  // namespace
}  // namespace weft::train
