// Training with the optimizer's state in files, as a user runs it: under a memory limit, killed, and on a disk that is full.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/command.h"

namespace weft {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::weft::testing::CommandResult;
using ::weft::testing::read_file;
using ::weft::testing::run_command;
using ::weft::testing::TempDir;
using ::weft::testing::weft_command;

/// 7 million parameters in bf16 with bf16 gradients: 28 MiB of them, and 83 MiB of optimizer state.
class OffloadCommand : public ::testing::Test {
 protected:
  void SetUp() override {
    std::ofstream text(dir_ / "text");
    for (int i = 0; i < 200; ++i) text << "the quick brown fox " << i << " jumps over the lazy dog\n";
    text.close();
    ASSERT_EQ(weft_command("data prepare " + (dir_ / "text") + " --out " + (dir_ / "data")).exit_code, 0);
    std::filesystem::create_directories(dir_ / "disk");
    std::ofstream(dir_ / "run.toml") << "[model]\nlayers = 4\nhidden = 384\nheads = 4\n[data]\ntrain = '" << dir_ / "data/train.bin"
                                     << "'\nseq = 16\n[train]\nsteps = 3\nglobal_batch = 2\ndtype = 'bf16'\ngradient_dtype = 'bf16'\nthreads = 1\n"
                                     << "[run]\ndir = '" << dir_ / "run" << "'\noverwrite = true\n[offload]\nbuffer_mb = 4\n";
  }

  std::string train(const std::string& arguments) const { return "train " + (dir_ / "run.toml") + " " + arguments; }
  std::string offloaded(const std::string& arguments = "") const {
    return train("--set offload.optimizer=nvme --set offload.dir=" + (dir_ / "disk") + " " + arguments);
  }

  TempDir dir_;
};

// 25 million parameters, and a process that may have 283 MiB in all: libraries, weights, gradients and activations fit, their 293 MiB of
// state do not even without them.
TEST_F(OffloadCommand, TrainsWithAStateLargerThanTheMemoryLimit) {
  constexpr const char* kLimit = "ulimit -d 290000; ";  // KiB
  const std::string large = "--set model.layers=8 --set model.hidden=512 ";
  const CommandResult without = run_command(kLimit + std::string(WEFT_BINARY " ") + train(large));
  EXPECT_EQ(without.exit_code, 2);
  EXPECT_THAT(without.err, AllOf(HasSubstr("out of memory"), HasSubstr("held and asked for"), HasSubstr("offload.optimizer = \"nvme\"")));
  const CommandResult with = run_command(kLimit + std::string(WEFT_BINARY " ") + offloaded(large));
  ASSERT_EQ(with.exit_code, 0) << with.err;
  EXPECT_THAT(with.out, AllOf(HasSubstr("done after 3 steps"), HasSubstr("through 16 MiB of buffers"),
                              ContainsRegex("predicted: .* moved, .* waiting for the disk; measured: ")));
  std::ifstream events(dir_ / "run/events.jsonl");
  std::string line, last;
  while (std::getline(events, line)) last = line;
  const auto offload = nlohmann::json::parse(last)["offload"];
  EXPECT_GT(offload["file_bytes"].get<double>(), 290000.0 * 1024);
  EXPECT_GT(offload["measured"]["bytes"].get<double>(), 400e6);
  EXPECT_GT(offload["predicted"]["step_s"].get<double>(), 0);
  EXPECT_TRUE(std::filesystem::is_empty(dir_ / "disk"));
  const auto rehearsed = nlohmann::json::parse(weft_command("rehearse" + offloaded(large + "--json").substr(5)).out);
  EXPECT_NEAR(rehearsed["at_peak"]["optimizer"].get<double>(), 16 << 20, 1e4);
}

// Whatever finds no memory first: a tensor, a kernel that generates code (which crashes where it finds none) or a thread of the disk.
TEST_F(OffloadCommand, AnyLackOfMemoryEndsWithTheTableAndALever) {
  for (const auto& [limit, arguments] : std::vector<std::pair<std::string, std::string>>{
           {"110000", train("")}, {"118000", train("")}, {"124000", offloaded()}, {"130000", offloaded()}, {"145000", train("")}, {"160000", offloaded()}}) {
    const CommandResult result = run_command("ulimit -d " + limit + "; " WEFT_BINARY " " + arguments);
    EXPECT_EQ(result.exit_code, 2) << limit << ": " << result.err;
    EXPECT_THAT(result.err, AllOf(HasSubstr("out of memory: "), HasSubstr("held and asked for"), HasSubstr("Largest lever: ")));
  }
}

TEST_F(OffloadCommand, AKillLeavesNothingOnTheDisk) {
  const CommandResult killed = run_command(
      WEFT_BINARY " " + offloaded("--set train.steps=100000") + " & pid=$!; while ! grep -q '\"step\":2' " + (dir_ / "run/metrics.jsonl") +
      " 2>/dev/null; do kill -0 $pid || exit 99; sleep 0.02; done; ls -l /proc/$pid/fd | grep " + (dir_ / "disk") + "; kill -9 $pid; wait $pid; true");
  EXPECT_THAT(killed.out, HasSubstr("(deleted)")) << killed.err;
  EXPECT_TRUE(std::filesystem::is_empty(dir_ / "disk"));
}

TEST_F(OffloadCommand, AFullDiskIsSaidBeforeTheFirstStepAndLosesNothing) {
  ASSERT_EQ(weft_command(offloaded("--set train.steps=1")).exit_code, 0);
  const std::string weights = read_file(dir_ / "run/model.safetensors");
  ASSERT_FALSE(weights.empty());
  const CommandResult full = run_command("ulimit -f 50000; " WEFT_BINARY " " + offloaded());
  EXPECT_EQ(full.exit_code, 2);
  EXPECT_THAT(full.err, AllOf(HasSubstr("no room for the optimizer's state of rank 0"), HasSubstr("it needs a file of 8"), HasSubstr("ulimit -f"),
                              HasSubstr("parallel.zero")));
  EXPECT_EQ(read_file(dir_ / "run/model.safetensors.earlier"), weights);
  const CommandResult nowhere = weft_command(train("--set offload.optimizer=nvme"));
  EXPECT_EQ(nowhere.exit_code, 2);
  EXPECT_THAT(nowhere.err, HasSubstr("offload.dir: missing"));
}

}  // namespace
}  // namespace weft
