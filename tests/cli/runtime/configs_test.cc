// Each file of configs/ runs as its own comment says, on a smaller model: the same losses under every strategy.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "tests/support/command.h"
#include "tests/support/tolerances.h"

namespace weft {
namespace {

using ::weft::testing::CommandResult;
using ::weft::testing::read_file;
using ::weft::testing::run_command;
using ::weft::testing::TempDir;
using ::weft::testing::weft_command;

/// The command after "# Run:" up to the file's name.
std::string documented_command(const std::string& file) {
  std::istringstream lines(read_file(file));
  for (std::string line; std::getline(lines, line);) {
    const size_t begin = line.find("weft run"), end = line.find(".toml");
    if (line.rfind("# Run:", 0) == 0 && begin < end && end != std::string::npos) return line.substr(begin, end + 5 - begin);
  }
  return {};
}

std::vector<double> losses_of(const std::string& run_dir) {
  std::vector<double> losses;
  std::istringstream lines(read_file(run_dir + "/metrics.jsonl"));
  for (std::string line; std::getline(lines, line);) losses.push_back(nlohmann::json::parse(line)["loss"].get<double>());
  return losses;
}

TEST(Configs, EachFileTrainsToTheSameLosses) {
  const TempDir dir;
  std::ofstream text(dir / "text");
  for (int i = 0; i < 600; ++i) text << "the quick brown fox " << i << " jumps over the lazy dog\n";
  text.close();
  ASSERT_EQ(weft_command("data prepare " + (dir / "text") + " --out " + (dir / "data")).exit_code, 0);
  // fp32: the bound of promise 1 for losses.
  const std::string smaller = " --set data.train=" + (dir / "data/train.bin") + " --set data.val=" + (dir / "data/val.bin") +
                              " --set model.layers=2 --set model.hidden=64 --set model.heads=2 --set data.seq=32 --set train.steps=4"
                              " --set train.dtype=fp32 --set schedule.warmup=1 --set schedule.final_ratio=0.1 --set optimizer.lr=1e-3"
                              " --set train.eval_every=0 --set train.eval_samples=8";
  std::set<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(WEFT_TEST_DATA "/../../configs")) files.insert(entry.path().filename());
  for (const char* strategy : {"zero0.toml", "zero1.toml", "zero2.toml", "zero3.toml", "hsdp.toml"}) EXPECT_TRUE(files.contains(strategy)) << strategy;
  std::vector<double> reference;
  for (const std::string& file : files) {
    std::string command = documented_command(WEFT_TEST_DATA "/../../configs/" + file);
    ASSERT_NE(command.find("-- weft train configs/" + file), std::string::npos) << file << ": " << command;
    const std::string run = dir / ("run-" + file);
    const std::string path = std::filesystem::path(WEFT_BINARY).parent_path();
    const CommandResult result = run_command("cd " WEFT_TEST_DATA "/../.. && PATH=" + path + ":$PATH " + command + smaller + " --set run.dir=" + run);
    ASSERT_EQ(result.exit_code, 0) << file << ": " << result.err;
    const std::vector<double> losses = losses_of(run);
    ASSERT_EQ(losses.size(), 4U) << file;
    EXPECT_LT(losses[3], losses[0]) << file;
    if (reference.empty()) reference = losses;
    for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], reference[i], testing::kFp32Losses * reference[i]) << file << " at " << i;
  }
}

}  // namespace
}  // namespace weft
