// What the survivors of a failure are told: who is at fault, at which call, soon.
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/types.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "tests/support/ranks.h"
#include "weft/comm/mesh.h"
#include "weft/core/error.h"

namespace weft {
namespace {

using testing::ProcessOptions;
using testing::RankBody;
using testing::RankProcesses;

constexpr std::chrono::seconds kShortDeadline{2};

// Runs fn until it throws a CommError and returns what that says.
std::string failure_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const CommError& e) {
    const CommFailure& f = e.failure();
    return nlohmann::json({{"rank", f.rank}, {"group", f.group}, {"op", f.op}, {"peers", f.peers}, {"cause", f.cause},
                           {"text", e.what()}}).dump();
  }
  return "{}";
}

// All-reduces of 1 MiB without end: a signal finds the rank inside one.
void reduce_forever(const std::vector<Comm>& comms) {
  at::Tensor t = at::ones({1 << 18});
  for (int i = 0;; ++i) {
    for (const Comm& comm : comms) comm.all_reduce(t, ReduceOp::avg).wait();
    if (i == 10) testing::note("reducing");
  }
}

const RankBody kReduce("reduce", [](World& world, const std::string&) {
  return failure_of([&] { reduce_forever({world.comm()}); });
});

const RankBody kMesh("mesh", [](World& world, const std::string&) {
  const Mesh mesh(world, {{"dp", 2}, {"tp", 2}});
  return failure_of([&] { reduce_forever({mesh["tp"], mesh["dp"]}); });
});

const RankBody kLate("late", [](World& world, const std::string& late) {
  world.comm().barrier();
  return failure_of([&] {
    at::Tensor t = at::ones({4});
    while (world.rank() == std::stoi(late)) ::pause();  // alive, but elsewhere, until the test is over
    world.comm().all_reduce(t).wait();
  });
});

const RankBody kAbort("abort", [](World& world, const std::string&) {
  return failure_of([&] {
    world.comm().barrier();
    if (world.rank() == 1) {
      try {
        guard(world, [] { throw std::runtime_error("the disk is full"); });
      } catch (const std::runtime_error&) {
      }
    }
    reduce_forever({world.comm()});
  });
});

const RankBody kMismatch("mismatch", [](World& world, const std::string& what) {
  const Comm& comm = world.comm();
  const bool odd = world.rank() == 1;
  return failure_of([&] {
    comm.barrier();
    at::Tensor t = at::ones({odd && what == "shape" ? 3 : 2, odd && what == "shape" ? 2 : 3}, odd && what == "dtype" ? at::kInt : at::kFloat);
    if (what == "rows") {
      at::Tensor in = at::ones({4, 2}), out = at::ones({odd ? 3 : 4, 2});
      comm.all_to_all(out, in, odd ? std::vector<int64_t>{1, 2} : std::vector<int64_t>{2, 2}, {2, 2}).wait();
    } else if (odd && what == "op") {
      comm.broadcast(t, 0).wait();
    } else {
      comm.all_reduce(t).wait();
    }
  });
});

nlohmann::json parsed(const testing::RankResult& result) {
  EXPECT_EQ(result.exit_code, 0) << result.result;
  const auto json = nlohmann::json::parse(result.result, nullptr, false);
  EXPECT_TRUE(json.is_object() && json.contains("peers")) << "no failure reported: " << result.result;
  return json;
}

void expect_blamed(const testing::RankResult& result, int culprit) {
  const auto json = parsed(result);
  EXPECT_EQ(json.value("peers", std::vector<int>{}), std::vector<int>{culprit}) << result.result;
}

class CommFault : public ::testing::TestWithParam<std::string> {
 protected:
  ProcessOptions options(std::chrono::milliseconds timeout = kShortDeadline, std::map<std::string, std::string> env = {}) const {
    return {.backend = GetParam(), .timeout = timeout, .environment = std::move(env)};
  }
};

// Returns the survivors' results after `number` was sent to `victim` in the middle of its work.
void strike(RankProcesses& ranks, int n, int victim, int number) {
  for (int r = 0; r < n; ++r) ASSERT_TRUE(ranks.await_note(r, "reducing")) << "rank " << r;
  ranks.signal(victim, number);
  std::vector<int> survivors;
  for (int r = 0; r < n; ++r) {
    if (r != victim) survivors.push_back(r);
  }
  const auto results = ranks.wait(survivors);
  for (const int r : survivors) expect_blamed(results[static_cast<size_t>(r)], victim);
  for (int r = 0; r < n; ++r) EXPECT_EQ(::kill(ranks.pid(r), 0), -1) << "rank " << r << " was left behind";
}

TEST_P(CommFault, KilledRankIsNamed) {
  RankProcesses ranks(3, "reduce", "", options());
  strike(ranks, 3, 2, SIGKILL);
}

TEST_P(CommFault, KilledFirstRankIsNamed) {
  RankProcesses ranks(3, "reduce", "", options());
  strike(ranks, 3, 0, SIGKILL);
}

TEST_P(CommFault, StoppedRankIsNamed) {
  RankProcesses ranks(3, "reduce", "", options());
  strike(ranks, 3, 2, SIGSTOP);
}

TEST_P(CommFault, StoppedFirstRankIsNamed) {
  RankProcesses ranks(3, "reduce", "", options());
  strike(ranks, 3, 0, SIGSTOP);
}

TEST_P(CommFault, AllOfAMeshNameTheKilledRankNotEachOther) {
  RankProcesses ranks(4, "mesh", "", options());
  strike(ranks, 4, 3, SIGKILL);
}

TEST_P(CommFault, RankThatNeverArrivesIsNamed) {
  RankProcesses ranks(3, "late", "1", options());
  const auto results = ranks.wait({0, 2});
  for (const int r : {0, 2}) expect_blamed(results[static_cast<size_t>(r)], 1);
}

TEST_P(CommFault, AbortReachesPeersWithItsReason) {
  // The deadline is far away: what ends the peers is the abort.
  RankProcesses ranks(3, "abort", "", options(RankProcesses::kPatience * 10));
  for (const auto& result : ranks.wait()) {
    expect_blamed(result, 1);
    EXPECT_NE(parsed(result)["cause"].get<std::string>().find("the disk is full"), std::string::npos) << result.result;
  }
}

TEST_P(CommFault, DebugLevelNamesTheFirstDifference) {
  const std::map<std::string, std::vector<std::string>> expected = {
      {"op", {"all_reduce(sum)", "broadcast(root 0)"}},
      {"shape", {"[2, 3]", "[3, 2]"}},
      {"dtype", {"Float", "Int"}},
      {"rows", {"rank 0 sends 2 rows to rank 1, which expects 1"}},
  };
  for (const auto& [what, texts] : expected) {
    RankProcesses ranks(2, "mismatch", what, options(testing::kTestTimeout, {{"WEFT_DEBUG", "2"}}));
    for (const auto& result : ranks.wait()) {
      const std::string cause = parsed(result).value("cause", "");
      for (const auto& text : texts) EXPECT_NE(cause.find(text), std::string::npos) << what << ": " << result.result;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, CommFault, ::testing::Values("local", "gloo"), [](const auto& info) { return info.param; });

class ThreadFault : public ::testing::TestWithParam<BackendKind> {};

TEST_P(ThreadFault, ExceptionOfOneRankEndsTheOthersAndIsRethrown) {
  std::string text;
  try {
    testing::on_threads(3, [](World& world) {
      at::Tensor t = at::ones({4});
      if (world.rank() == 2) throw std::runtime_error("bad batch");
      EXPECT_THROW(for (;;) world.comm().all_reduce(t).wait(), CommError);
    }, GetParam());
  } catch (const std::runtime_error& e) {
    text = e.what();
  }
  EXPECT_EQ(text, "bad batch");
}

INSTANTIATE_TEST_SUITE_P(Backends, ThreadFault, ::testing::Values(BackendKind::local, BackendKind::gloo),
                         [](const auto& info) { return info.param == BackendKind::local ? "local" : "gloo"; });

}  // namespace
}  // namespace weft
