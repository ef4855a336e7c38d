// An exception on one rank, wherever it happens, ends the others long before their deadline and with its text.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/support/ranks.h"
#include "weft/core/cause.h"
#include "weft/core/error.h"

namespace weft {
namespace {

using testing::RankBody;
using testing::RankProcesses;

// The deadline is far beyond what RankProcesses waits for: what ends a wait is the abort. How soon it does is counted in
// unit_comm.Pulse.* and measured by bench_abort.
constexpr std::chrono::minutes kFarDeadline{15};
static_assert(kFarDeadline > 5 * RankProcesses::kPatience);

nlohmann::json report_of(const CommError& e) { return {{"peers", e.failure().peers}, {"cause", e.failure().cause}}; }

// What rank 1 does while the others wait in an all-reduce for it; each way throws "the disk is full", as libtorch throws: with its
// stack behind the cause.
[[noreturn]] void full() { C10_THROW_ERROR(Error, "the disk is full"); }

void in_a_hook() {
  at::Tensor x = at::ones({3}).requires_grad_();
  x.register_hook([](const at::Tensor&) -> at::Tensor { full(); });
  (x * 2).sum().backward();
}

void with_work_in_flight(const Comm& comm) {
  const at::Tensor mine = at::ones({16 << 20}), shared = comm.allocate({4 << 20}, at::kFloat).fill_(1);
  const Work first = comm.all_reduce(mine), second = comm.all_reduce(shared);
  full();  // unwinding drops the works and frees the tensors, while peers read them
}

const RankBody kThrow("throw", [](World& world, const std::string& where) {
  const Comm& comm = world.comm();
  nlohmann::json report;
  try {
    comm.barrier();
    if (world.rank() != 1) {
      // The same calls as rank 1's, as far as it makes any.
      if (where == "work in flight") {
        at::Tensor a = at::ones({16 << 20}), b = comm.allocate({4 << 20}, at::kFloat).fill_(1);
        comm.all_reduce(a).wait();
        comm.all_reduce(b).wait();
      }
      at::Tensor t = at::ones({1000});
      for (;;) comm.all_reduce(t).wait();
    } else if (where == "a hook") {
      guard(world, in_a_hook);
    } else if (where == "between steps") {
      guard(world, full);
    } else if (where == "work in flight") {
      guard(world, [&] { with_work_in_flight(comm); });
    } else {  // a worker thread: this rank's main thread waits in a call of its own, and is told as well
      std::thread worker([&] {
        try {
          guard(world, full);
        } catch (const c10::Error&) {
        }
      });
      try {
        at::Tensor missing = at::ones({3});
        comm.recv(missing, 0).wait();
      } catch (const CommError& e) {
        worker.join();
        return report_of(e).dump();
      }
      worker.join();
    }
  } catch (const CommError& e) {
    report = report_of(e);
  } catch (const c10::Error& e) {
    report = {{"text", cause_text(e.what())}};
  }
  return report.dump();
});

class Abort : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {};

TEST_P(Abort, ReachesAllRanksWithItsText) {
  const auto& [backend, where] = GetParam();
  RankProcesses ranks(3, "throw", where, {.backend = backend, .timeout = kFarDeadline, .environment = {}});
  const auto results = ranks.wait();
  for (int r : {0, 1, 2}) {
    const auto& result = results[static_cast<size_t>(r)];
    ASSERT_EQ(result.exit_code, 0) << "rank " << r << ": " << result.result;
    const auto report = nlohmann::json::parse(result.result);
    if (r == 1 && where != "a worker thread") {
      EXPECT_EQ(report.value("text", ""), "the disk is full") << result.result;
      continue;
    }
    EXPECT_EQ(report.value("peers", std::vector<int>{}), std::vector<int>{1}) << result.result;
    EXPECT_EQ(report.value("cause", ""), "the disk is full") << result.result;
  }
}

INSTANTIATE_TEST_SUITE_P(Everywhere, Abort,
                         ::testing::Combine(::testing::Values("local", "gloo"),
                                            ::testing::Values("a hook", "a worker thread", "between steps", "work in flight")),
                         [](const auto& info) {
                           std::string name = std::get<0>(info.param) + "_" + std::get<1>(info.param);
                           std::replace(name.begin(), name.end(), ' ', '_');
                           return name;
                         });

}  // namespace
}  // namespace weft
