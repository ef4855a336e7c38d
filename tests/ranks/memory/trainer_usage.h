// What the trainer's ranks held, for tests of memory accounts. Ranks are processes, as accounts are.
#pragma once

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
  const auto result = train::run(config::load(file), world, {.on_job = {}, .stop_requested = forget_construction, .on_step = {}});
  nlohmann::json reply;
  for (const memory::Usage& u : result.memory) {
    reply.push_back({{"live", u.live}, {"peak", u.peak}, {"live_of", u.live_of}, {"at_peak", u.at_peak}, {"peak_of", u.peak_of}});
  }
  return reply.dump();
}
inline const RankBody kTrainAndCount("train_and_count", train_and_count);

/// Trains `c` (data.train and run.dir are set here) for two steps on `ranks` processes: what each rank held.
inline std::vector<memory::Usage> usage_of_training(config::RunConfig c, int ranks) {
  const TempDir dir;
  data::TokenWriter writer(dir / "train.bin", c.model.vocab, "bytes");
  std::vector<uint32_t> tokens;
  for (uint32_t i = 0; i < 4000; ++i) tokens.push_back((i * 5 + i / 11) % static_cast<uint32_t>(c.model.vocab));
  writer.append(tokens);
  writer.finish();
  c.train.steps = 2;
  c.data.train = dir / "train.bin";
  c.run.dir = dir / "run";
  std::ofstream(dir / "run.toml") << config::to_toml(c, false);
  const auto results = on_processes(ranks, "train_and_count", dir / "run.toml");
  for (const auto& rank : results) EXPECT_EQ(rank.exit_code, 0) << rank.result;
  std::vector<memory::Usage> usages;
  if (::testing::Test::HasFailure()) return usages;
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

}  // namespace weft::testing
