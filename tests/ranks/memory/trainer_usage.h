// What the trainer's ranks held, for tests of memory accounts. Ranks are processes, as accounts are.
#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/ranks.h"
#include "tests/support/temp_dir.h"
#include "weft/config/parse.h"
#include "weft/data/token_file.h"
#include "weft/memory/cpu_allocator.h"
#include "weft/train/trainer.h"

namespace weft::testing {

inline std::string train_and_count(World& world, const std::string& file) {
  install_cpu_allocator();
  // Asked after the first backward: from then on peaks are those of training, without the model's construction.
  const auto forget_construction = [first = true]() mutable {
    if (std::exchange(first, false)) memory::reset_peak();
    return false;
  };
  const auto result = train::run(config::load(file), world, {.on_job = [](const train::Job& job) { at::set_num_threads(static_cast<int>(job.config.train.threads)); },
                                                                  .stop_requested = forget_construction, .on_step = {}});
  nlohmann::json reply;
  for (const memory::Usage& u : result.memory) {
    reply.push_back({{"live", u.live}, {"peak", u.peak}, {"live_of", u.live_of}, {"at_peak", u.at_peak}, {"peak_of", u.peak_of}});
  }
  return reply.dump();
}
inline const RankBody kTrainAndCount("train_and_count", train_and_count);

/// A token file and a run folder for `config`, as long as it lives. Two steps.
class TrainerRun {
 public:
  explicit TrainerRun(config::RunConfig config) : config_(std::move(config)) {
    data::TokenWriter writer(dir_ / "train.bin", config_.model.vocab, "bytes");
    std::vector<uint32_t> tokens;
    for (uint32_t i = 0; i < 4000; ++i) tokens.push_back((i * 5 + i / 11) % static_cast<uint32_t>(config_.model.vocab));
    writer.append(tokens);
    writer.finish();
    config_.train.steps = 2;
    config_.train.threads = 1;
    config_.data.train = dir_ / "train.bin";
    config_.run.dir = dir_ / "run";
    std::ofstream(dir_ / "run.toml") << config::to_toml(config_, false);
  }

  const config::RunConfig& config() const { return config_; }

  /// What each of `ranks` processes held.
  std::vector<memory::Usage> usage(int ranks) const {
    const auto results = on_processes(ranks, "train_and_count", dir_ / "run.toml");
    std::vector<memory::Usage> usages;
    for (const auto& rank : results) {
      EXPECT_EQ(rank.exit_code, 0) << rank.result;
      if (rank.exit_code != 0) return usages;
    }
    for (const auto& json : nlohmann::json::parse(results[0].result)) {
      memory::Usage u;
      u.live = json["live"];
      u.peak = json["peak"];
      u.live_of = json["live_of"].get<memory::Amounts>();
      u.at_peak = json["at_peak"].get<memory::Amounts>();
      u.peak_of = json["peak_of"].get<memory::Amounts>();
      usages.push_back(u);
    }
    EXPECT_EQ(usages.size(), static_cast<size_t>(ranks));
    return usages;
  }

 private:
  TempDir dir_;
  config::RunConfig config_;
};

}  // namespace weft::testing
