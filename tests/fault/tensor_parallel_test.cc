// An exception in one tensor-parallel rank's forward or backward: the others wait for it inside of a layer, and are told.
#include <gmock/gmock.h>

#include <mutex>
#include <nlohmann/json.hpp>

#include "tests/support/ranks.h"
#include "tests/support/test_pch.h"
#include "weft/core/error.h"
#include "weft/nn/deferred.h"
#include "weft/parallel/data_parallel.h"
#include "weft/parallel/parallelize.h"

namespace weft {
namespace {

struct BombedImpl : torch::nn::Module {
  BombedImpl() {
    up = register_module("up", Split<torch::nn::Linear>(4, 6));
    down = register_module("down", Split<torch::nn::Linear>(6, 4));
  }
  /// bomb: "forward", "backward", or nothing.
  at::Tensor forward(const at::Tensor& x, const std::string& bomb) {
    at::Tensor h = torch::tanh(up(x));
    if (bomb == "forward") throw std::runtime_error("the mask has no rows");
    if (bomb == "backward") h.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("the mask has no rows"); });
    return down(h);
  }
  Split<torch::nn::Linear> up{nullptr}, down{nullptr};
};
TORCH_MODULE(Bombed);

/// Rank 1's bomb goes off in the second of three steps.
void three_steps(World& world, const std::string& where) {
  Bombed net = deferred([] { return Bombed(); }, {.seed = 1});
  parallelize(*net, world.comm(), {{"up", TensorStyle::column}, {"down", TensorStyle::row}});
  DataParallel dp(net, Comm());
  for (int step = 0; step < 3; ++step) {
    const bool off = step == 1 && world.rank() == 1;
    net(torch::ones({2, 3, 4}).requires_grad_(), off ? where : "").square().sum().backward();
    dp.zero_grad();
  }
}

const testing::RankBody kBomb("tensor parallel bomb", [](World& world, const std::string& how) -> std::string {
  const std::string where = how.substr(0, how.find(' '));
  const bool guarded = how.find("guarded") != std::string::npos;
  try {
    guarded ? guard(world, [&] { three_steps(world, where); }) : three_steps(world, where);
  } catch (const CommError& e) {
    return nlohmann::json{{"peers", e.failure().peers}, {"cause", e.failure().cause}}.dump();
  }
  return "no error";
});

TEST(TensorParallelFault, ProcessesAreToldByName) {
  // The deadline is far beyond what the test waits for.
  for (const std::string backend : {"local", "gloo"}) {
    for (const std::string how : {"forward guarded", "backward guarded", "forward and its process ends"}) {
      if (backend == "gloo" && how != "forward guarded") continue;
      testing::RankProcesses ranks(3, "tensor parallel bomb", how, {.backend = backend, .timeout = std::chrono::minutes(15)});
      const auto results = ranks.wait();
      EXPECT_NE(results[1].exit_code, 0);
      EXPECT_THAT(results[1].result, ::testing::HasSubstr("the mask has no rows"));
      for (const int other : {0, 2}) {
        ASSERT_EQ(results[static_cast<size_t>(other)].exit_code, 0) << results[static_cast<size_t>(other)].result;
        const auto report = nlohmann::json::parse(results[static_cast<size_t>(other)].result, nullptr, false);
        ASSERT_FALSE(report.is_discarded()) << results[static_cast<size_t>(other)].result;
        EXPECT_EQ(report["peers"], nlohmann::json::array({1})) << backend << ", " << how << ": " << report;
        const char* cause = how.find("guarded") != std::string::npos ? "the mask has no rows" : "";
        EXPECT_THAT(report["cause"], ::testing::HasSubstr(cause));
      }
    }
  }
}

TEST(TensorParallelFault, ThreadsAreToldByName) {
  for (const std::string where : {"forward", "backward"}) {
    std::mutex lock;
    std::vector<std::vector<int>> blamed;
    const auto body = [&](World& world) {
      try {
        three_steps(world, where);
      } catch (const CommError& e) {
        const std::lock_guard hold(lock);
        blamed.push_back(e.failure().peers);
        throw;
      }
    };
    try {
      World::threads(3, body, {.timeout = std::chrono::minutes(15)});
      ADD_FAILURE() << "nobody threw";
    } catch (const std::exception& e) {
      EXPECT_THAT(e.what(), ::testing::HasSubstr("the mask has no rows"));
    }
    EXPECT_EQ(blamed, (std::vector<std::vector<int>>{{1}, {1}}));
  }
}

}  // namespace
}  // namespace weft
