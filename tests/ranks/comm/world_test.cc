// Where ranks come from, how groups are made of them, and what a program that hosts them keeps.
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/types.h>

#include <cfenv>
#include <clocale>
#include <cstring>
#include <exception>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/support/ranks.h"
#include "weft/comm/mesh.h"
#include "weft/core/error.h"
#include "weft/parallel/data_parallel.h"

extern char** environ;

namespace weft {
namespace {

double sum_of_ranks(const Comm& comm, int world_rank) {
  at::Tensor t = at::full({3}, world_rank, at::kDouble);
  comm.all_reduce(t).wait();
  return t[0].item<double>();
}

class OnBackend : public ::testing::TestWithParam<BackendKind> {};
INSTANTIATE_TEST_SUITE_P(Backends, OnBackend, ::testing::Values(BackendKind::local, BackendKind::gloo),
                         [](const auto& info) { return info.param == BackendKind::local ? "local" : "gloo"; });

TEST_P(OnBackend, MeshOfTwoByTwo) {
  testing::on_threads(4, [](World& world) {
    const Mesh mesh(world, {{"dp", 2}, {"tp", 2}});
    const int r = world.rank();
    EXPECT_EQ(mesh.coord("dp"), r / 2);
    EXPECT_EQ(mesh.coord("tp"), r % 2);
    EXPECT_EQ(sum_of_ranks(mesh["tp"], r), r < 2 ? 0 + 1 : 2 + 3);
    EXPECT_EQ(sum_of_ranks(mesh["dp"], r), r % 2 == 0 ? 0 + 2 : 1 + 3);
    const Comm flat = mesh[{"dp", "tp"}];
    EXPECT_EQ(flat.rank(), r);
    EXPECT_EQ(sum_of_ranks(flat, r), 6);
    EXPECT_EQ(mesh["pp"].size(), 1);
    EXPECT_EQ(mesh.size("dp"), 2);
    EXPECT_NE(mesh.describe().find("dp=2 x tp=2 (4 ranks)"), std::string::npos) << mesh.describe();
  }, GetParam());
}

TEST_P(OnBackend, MeshOfThreeByOneAndDpAsProduct) {
  testing::on_threads(3, [](World& world) {
    const Mesh mesh(world, {{"dp", 3}, {"tp", 1}});
    EXPECT_EQ(mesh["tp"].size(), 1);
    EXPECT_EQ(sum_of_ranks(mesh["dp"], world.rank()), 3);
    const Mesh hybrid(world, {{"dp_replicate", 1}, {"dp_shard", 3}});
    EXPECT_EQ(hybrid.size("dp"), 3);
    EXPECT_EQ(sum_of_ranks(hybrid["dp"], world.rank()), 3);
  }, GetParam());
}

TEST_P(OnBackend, SplitOrdersByKeyAndDropsNegativeColors) {
  testing::on_threads(4, [](World& world) {
    const int r = world.rank();
    const Comm part = world.comm().split(r == 3 ? -1 : 7, -r, "part");
    EXPECT_EQ(part.size(), r == 3 ? 1 : 3);
    if (r != 3) {
      EXPECT_EQ(part.rank(), 2 - r);
      EXPECT_EQ(part.world_rank(0), 2);
      EXPECT_EQ(sum_of_ranks(part, r), 3);
      EXPECT_EQ(part.name(), "part");
    }
  }, GetParam());
}

TEST_P(OnBackend, CallsOfTwoGroupsAndDroppedWorksComplete) {
  testing::on_threads(3, [](World& world) {
    const Comm other = world.comm().split(0, 0, "other");
    at::Tensor a = at::ones({1000}), b = at::ones({1000}, at::kBFloat16), c = at::ones({10});
    static_cast<void>(world.comm().all_reduce(a));
    static_cast<void>(other.all_reduce(b));
    Work work = other.all_reduce(c);
    work.wait();
    work.released();
    world.comm().barrier();
    other.barrier();
    world.comm().progress();
    other.progress();
    EXPECT_EQ(a.sum().item<double>(), 3000);
    EXPECT_EQ(c.sum().item<double>(), 30);
    // The bf16 sum is brought back once this rank has seen the end of the call.
    while (b[0].item<float>() != 3) other.progress();
  }, GetParam());
}

TEST_P(OnBackend, TrafficIsCountedWithTheFieldsFactors) {
  testing::on_threads(4, [](World& world) {
    const Comm& comm = world.comm();
    at::Tensor t = at::ones({100}), all = at::ones({400});
    comm.all_reduce(t).wait();
    comm.all_reduce(t).wait();
    comm.all_gather(all, t).wait();
    comm.reduce_scatter(t, all).wait();
    comm.all_to_all(at::empty({400}), all).wait();
    const auto traffic = comm.traffic();
    EXPECT_EQ(traffic.at("all_reduce").calls, 2);
    EXPECT_EQ(traffic.at("all_reduce").bytes, 2 * 400);
    EXPECT_EQ(traffic.at("all_reduce").sent, 2 * (2 * 3 * 400 / 4));
    EXPECT_EQ(traffic.at("all_gather").bytes, 1600);
    EXPECT_EQ(traffic.at("all_gather").sent, 1200);
    EXPECT_EQ(traffic.at("reduce_scatter").sent, 1200);
    EXPECT_EQ(traffic.at("all_to_all").sent, 1200);
    EXPECT_EQ(traffic.count("broadcast"), 0u);
    const auto log = nlohmann::json::parse(comm.flight_log());
    EXPECT_EQ(log["rank"], world.rank());
    EXPECT_EQ(log["calls"].size(), 5u);
    EXPECT_EQ(log["calls"][1]["op"], "all_reduce");
    EXPECT_EQ(log["calls"][1]["seq"], 1);
    EXPECT_EQ(log["calls"][1]["state"], "done");
  }, GetParam());
}

TEST_P(OnBackend, WrongArgumentsAreRefusedWithTheirValues) {
  testing::on_threads(2, [](World& world) {
    const Comm& comm = world.comm();
    const auto refused = [](const std::string& text, const std::function<void()>& fn) {
      try {
        fn();
        ADD_FAILURE() << "accepted: " << text;
      } catch (const ConfigError& e) {
        EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
      }
    };
    at::Tensor t = at::ones({4, 2});
    refused("not contiguous", [&] { comm.all_reduce(t.t()).wait(); });
    refused("undefined", [&] { comm.all_reduce(at::Tensor()).wait(); });
    refused("moves CPU tensors", [&] { comm.all_reduce(at::empty({2}, at::kMeta)).wait(); });
    refused("no defined sum", [&] { comm.all_reduce(at::ones({2}, at::kComplexFloat)).wait(); });
    refused("2 times", [&] { comm.all_gather(at::ones({9}), at::ones({4})).wait(); });
    refused("differ in dtype", [&] { comm.all_gather(at::ones({8}), at::ones({4}, at::kDouble)).wait(); });
    refused("root 2", [&] { comm.broadcast(t, 2).wait(); });
    refused("this rank itself", [&] { comm.send(t, comm.rank()).wait(); });
    refused("sum to 3", [&] { comm.all_to_all(t.clone(), t, {2, 2}, {1, 2}).wait(); });
    refused("negative", [&] { comm.all_to_all(t.clone(), t, {2, 2}, {-1, 5}).wait(); });
    refused("do not split evenly", [&] { comm.all_to_all(at::ones({3}), at::ones({3})).wait(); });
    refused("product is 4", [&] { Mesh(world, {{"dp", 2}, {"tp", 2}}); });
    refused("no axis 'ttp'", [&] { Mesh(world, {{"dp", 2}})["ttp"]; });
    EXPECT_EQ(sum_of_ranks(comm, 1), 2);  // a refused call is no call: the group goes on
  }, GetParam());
}

TEST(World, AloneIsTheIdentity) {
  const Comm comm;
  at::Tensor t = at::ones({3}), out = at::empty({3});
  comm.all_reduce(t, ReduceOp::avg).wait();
  comm.all_gather(out, t).wait();
  comm.barrier();
  EXPECT_TRUE(at::equal(t, out));
  EXPECT_EQ(comm.all_gather_text("x"), std::vector<std::string>{"x"});
  EXPECT_TRUE(comm.traffic().empty());
}

TEST(World, FromAStoreSeveralAtOnce) {
  const auto first = c10::make_intrusive<c10d::HashStore>(), second = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      const World one = World::from_store(first, r, 3), two = World::from_store(second, 2 - r, 3);
      EXPECT_EQ(sum_of_ranks(one.comm(), r), 3);
      EXPECT_EQ(sum_of_ranks(two.comm(), 10 + r), 33);
      EXPECT_EQ(two.comm().split(0, 0, "again").rank(), 2 - r);
    });
  }
  for (auto& thread : threads) thread.join();
}

// A host program's own back end: all ranks have the same data, so that a sum is a product.
class UniformBackend final : public c10d::Backend {
 public:
  using c10d::Backend::Backend;
  const std::string getBackendName() const override { return "uniform"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions&) override {
    tensors[0].mul_(getSize());
    return c10::make_intrusive<Done>();
  }

 private:
  struct Done final : c10d::Work {
    bool wait(std::chrono::milliseconds) override { return true; }
  };
};

TEST(World, FromAUsersBackend) {
  const auto backend = c10::make_intrusive<UniformBackend>(1, 4);
  const World world = World::from_backend(backend);
  EXPECT_EQ(world.rank(), 1);
  EXPECT_EQ(world.size(), 4);
  at::Tensor t = at::ones({2});
  world.comm().all_reduce(t).wait();
  EXPECT_EQ(t[0].item<double>(), 4);
  EXPECT_EQ(world.comm().traffic().at("all_reduce").calls, 1);
  try {
    world.comm().barrier();
    ADD_FAILURE() << "the back end has no barrier";
  } catch (const CommError& e) {
    EXPECT_NE(std::string(e.what()).find("does not support barrier"), std::string::npos) << e.what();
  }
  EXPECT_THROW(Mesh(world, {{"dp", 2}, {"tp", 2}}), ConfigError);
}

TEST(World, RehearsalCountsWithoutPeers) {
  const World world = World::rehearse(13, 1024);
  const Mesh mesh(world, {{"dp", 128}, {"tp", 8}});
  EXPECT_EQ(mesh["tp"].rank(), 5);
  at::Tensor shard = at::empty({1 << 20}, at::TensorOptions().device(at::kMeta).dtype(at::kBFloat16));
  at::Tensor full = at::empty({8 << 20}, shard.options());
  mesh["tp"].all_gather(full, shard).wait();
  EXPECT_EQ(mesh["tp"].traffic().at("all_gather").sent, 7 * (2 << 20));
  at::Tensor t = at::full({4}, 2.0);
  mesh["dp"].all_reduce(t).wait();
  EXPECT_EQ(t[0].item<double>(), 2.0);
}

// What a host program would notice if it changed. Taken before main: libtorch is loaded, no world was made yet.
struct Surroundings {
  std::vector<void*> handlers;
  cpu_set_t affinity{};
  int threads = at::get_num_threads();
  c10::Allocator* allocator = c10::GetAllocator(at::kCPU);
  at::Tensor generator = at::detail::getDefaultCPUGenerator().get_state();
  sigset_t blocked{};
  std::fenv_t floating_point{};
  std::terminate_handler on_terminate = std::get_terminate();
  std::streambuf* out = std::cout.rdbuf();
  std::string locale = std::setlocale(LC_ALL, nullptr);
  std::string folder = std::filesystem::current_path();
  std::vector<std::string> variables;

  Surroundings() {
    for (int number = 1; number < NSIG; ++number) {
      struct sigaction action{};
      ::sigaction(number, nullptr, &action);
      handlers.push_back(reinterpret_cast<void*>(action.sa_handler));
    }
    ::sched_getaffinity(0, sizeof affinity, &affinity);
    ::pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
    std::fegetenv(&floating_point);
    for (char** entry = environ; *entry; ++entry) variables.emplace_back(*entry);
  }
};
const Surroundings& at_start() {
  static const Surroundings surroundings;
  return surroundings;
}
const bool kTaken = (at_start(), true);

const testing::RankBody kGuest("guest", [](World& world, const std::string&) {
  EXPECT_TRUE(kTaken);
  const Mesh mesh(world, {{"dp", 2}});
  at::Tensor t = at::ones({1000}, at::kBFloat16);
  // A whole training step: hooks, buckets, clipping.
  const auto before_model = at::detail::getDefaultCPUGenerator().get_state();
  torch::nn::Linear net(4, 3);
  auto generator = at::detail::getDefaultCPUGenerator();
  generator.set_state(before_model);  // the model's own start values were drawn from it
  DataParallel dp(net.ptr(), mesh["dp"]);
  scale_loss(net(at::ones({2, 4})).square().sum(), 4, dp).backward();
  dp.clip_grad_norm(1.0);
  mesh["dp"].all_reduce(t).wait();
  World second = World::init({.timeout = testing::kTestTimeout});
  EXPECT_EQ(sum_of_ranks(second.comm(), world.rank()), 1);
  const Surroundings now;
  EXPECT_EQ(now.handlers, at_start().handlers);
  EXPECT_TRUE(CPU_EQUAL(&now.affinity, &at_start().affinity));
  EXPECT_EQ(now.threads, at_start().threads);
  EXPECT_EQ(now.allocator, at_start().allocator);
  EXPECT_EQ(std::memcmp(&now.blocked, &at_start().blocked, sizeof now.blocked), 0);
  EXPECT_EQ(std::memcmp(&now.floating_point.__control_word, &at_start().floating_point.__control_word, 2), 0);
  EXPECT_EQ(now.floating_point.__mxcsr & ~0x3fu, at_start().floating_point.__mxcsr & ~0x3fu);  // but for the sticky flags
  EXPECT_EQ(now.on_terminate, at_start().on_terminate);
  EXPECT_EQ(now.out, at_start().out);
  EXPECT_EQ(now.locale, at_start().locale);
  EXPECT_EQ(now.folder, at_start().folder);
  EXPECT_EQ(now.variables, at_start().variables);
  EXPECT_TRUE(at::equal(now.generator, at_start().generator));
  return std::string("unchanged");
});

TEST_P(OnBackend, AGuestLeavesItsHostAsItWasAndMakesSeveralWorlds) {
  for (const auto& result : testing::on_processes(2, "guest", "", GetParam() == BackendKind::local ? "local" : "gloo")) {
    EXPECT_EQ(result.exit_code, 0) << result.result;
    EXPECT_EQ(result.result, "unchanged");
  }
}

}  // namespace
}  // namespace weft
