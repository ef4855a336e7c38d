// Flight logs, written on demand and on failure, and what `weft doctor` reads from them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/types.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

#include "tests/support/command.h"
#include "tests/support/ranks.h"
#include "weft/comm/flight_dump.h"
#include "weft/core/error.h"
#include "weft/core/json.h"

namespace weft {
namespace {

using testing::RankBody;
using testing::RankProcesses;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::chrono::minutes kFlightDeadline{15};

const RankBody kFlightReduce("flight.reduce", [](World& world, const std::string& folder) -> std::string {
  install_flight_signal(SIGUSR1, folder);
  at::Tensor t = at::ones({1 << 18});
  for (int i = 0;; ++i) {
    world.comm().all_reduce(t, ReduceOp::avg).wait();
    if (i == 5) testing::note("reducing");
  }
});

const RankBody kElsewhere("flight.elsewhere", [](World& world, const std::string& folder) -> std::string {
  install_flight_signal(SIGUSR1, folder);
  const Comm pair = world.comm().split(world.rank() == 2 ? -1 : 0, 0, "pair");
  world.comm().barrier();
  testing::note("ready");
  at::Tensor t = at::ones({4});
  while (world.rank() == 1) ::pause();
  if (world.rank() == 0) pair.all_reduce(t).wait();  // rank 1 does not come, and rank 2 waits for rank 0
  world.comm().all_reduce(t).wait();
  return "";
});

const RankBody kDiverge("flight.diverge", [](World& world, const std::string&) -> std::string {
  at::Tensor t = at::ones({4});
  for (int i = 0; i < 3; ++i) world.comm().all_reduce(t).wait();
  if (world.rank() == 1) {
    world.comm().broadcast(t, 0).wait();
  } else {
    world.comm().all_reduce(t).wait();
  }
  return "";
});

class Flight : public ::testing::TestWithParam<std::string> {
 protected:
  testing::TempDir dir;
  std::string folder() const { return dir / "."; }

  // Asks ranks for their logs until all have written one.
  void ask(RankProcesses& ranks, const std::vector<int>& whom) {
    for (const int r : whom) {
      const std::string file = dir / ("flight-rank" + std::to_string(r) + ".json");
      ranks.signal(r, SIGUSR1);
      while (!std::filesystem::exists(file) || testing::read_file(file).find("\n}\n") == std::string::npos) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));  // bounded by CTest's time-out
      }
    }
  }
  Json doctor() {
    const auto result = testing::weft_command("doctor --json " + folder());
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return parse_json(result.out, "doctor");
  }
};
INSTANTIATE_TEST_SUITE_P(Backends, Flight, ::testing::Values("local", "gloo"), [](const auto& info) { return info.param; });

TEST_P(Flight, OnDemandTheStoppedRankIsNamed) {
  RankProcesses ranks(3, "flight.reduce", folder(), {.backend = GetParam(), .timeout = kFlightDeadline, .environment = {}});
  for (int r = 0; r < 3; ++r) ASSERT_TRUE(ranks.await_note(r, "reducing"));
  ranks.signal(2, SIGSTOP);
  Json report;
  do {  // until both have come to the call that never ends
    for (const int r : {0, 1}) std::filesystem::remove(dir / ("flight-rank" + std::to_string(r) + ".json"));
    ask(ranks, {0, 1});
    report = doctor();
  } while (report["waits"].size() < 2);
  EXPECT_EQ(report["no_log"], Json({2}));
  EXPECT_THAT(report["verdict"][0].get<std::string>(), AllOf(HasSubstr("rank 2 never came to all_reduce #"), HasSubstr("left no log")));
  EXPECT_THAT(testing::weft_command("doctor " + folder()).out, HasSubstr("! rank 2 never came to all_reduce #"));
}

TEST_P(Flight, WhoHoldsEverybodyUpIsNamedAndNotWhoIsHeldUp) {
  RankProcesses ranks(3, "flight.elsewhere", folder(), {.backend = GetParam(), .timeout = kFlightDeadline, .environment = {}});
  for (int r = 0; r < 3; ++r) ASSERT_TRUE(ranks.await_note(r, "ready"));
  Json report;
  do {
    for (const int r : {0, 1, 2}) std::filesystem::remove(dir / ("flight-rank" + std::to_string(r) + ".json"));
    ask(ranks, {0, 1, 2});
    report = doctor();
  } while (report["waits"].size() < 2);
  ASSERT_EQ(report["verdict"].size(), 1u) << report.dump(1);
  EXPECT_THAT(report["verdict"][0].get<std::string>(),
              AllOf(HasSubstr("rank 1 never came to all_reduce #0 of 'pair'"), HasSubstr("made barrier #1 of 'world' last")));
}

TEST(FlightOnFailure, TheFirstDifferentCallIsNamed) {
  const testing::TempDir dir;
  RankProcesses ranks(3, "flight.diverge", "", {.backend = "local", .timeout = testing::kTestTimeout,
                                                .environment = {{"WEFT_FLIGHT_DIR", dir / "."}}});
  for (const auto& result : ranks.wait()) EXPECT_EQ(result.exit_code, static_cast<int>(ExitCode::comm)) << result.result;
  const auto result = testing::weft_command("doctor " + (dir / "."));
  EXPECT_THAT(result.out, AllOf(HasSubstr("the ranks call different things as collective #3 of 'world'"),
                                HasSubstr("rank 1 called broadcast of 4 Float from root 0"), HasSubstr("failed: ranks disagree")));
}

TEST(Doctor, SaysWhenThereIsNoFlightLog) {
  const testing::TempDir dir;
  const auto result = testing::weft_command("doctor " + (dir / "."));
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("holds no flight-rank*.json"));
}

}  // namespace
}  // namespace weft
