// Faults of other systems' communication, with the right values; docs/cases.md maps them to tests.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <barrier>
#include <cmath>
#include <thread>

#include "tests/support/ranks.h"
#include "weft/comm/mesh.h"
#include "weft/core/error.h"

namespace weft {
namespace {

class CommCases : public ::testing::TestWithParam<BackendKind> {};
INSTANTIATE_TEST_SUITE_P(Backends, CommCases, ::testing::Values(BackendKind::local, BackendKind::gloo),
                         [](const auto& info) { return info.param == BackendKind::local ? "local" : "gloo"; });

// 1 + 3 x 2^-9 in bf16: each addend alone is a quarter of the last place and would vanish one by one; their sum rounds to
// the next number after 1.
TEST_P(CommCases, Bf16SumsAccumulateInFp32) {
  testing::on_threads(4, [](World& world) {
    const double mine = world.rank() == 0 ? 1.0 : std::exp2(-9);
    at::Tensor all = at::full({10}, mine, at::kBFloat16);
    world.comm().all_reduce(all).wait();
    EXPECT_EQ(all[9].item<double>(), 1.0 + std::exp2(-7));
    at::Tensor part = at::empty({5}, at::kBFloat16);
    world.comm().reduce_scatter(part, at::full({20}, mine, at::kBFloat16)).wait();
    EXPECT_EQ(part[4].item<double>(), 1.0 + std::exp2(-7));
  }, GetParam());
}

// Rank 0 sends nothing to itself and 3 rows to rank 1; rank 1 sends 5 rows to rank 0 and nothing to itself.
TEST_P(CommCases, UnevenAllToAllWithEmptyParts) {
  testing::on_threads(2, [](World& world) {
    const bool first = world.rank() == 0;
    const at::Tensor in = at::full({first ? 3 : 5, 2}, world.rank() + 1.0);
    at::Tensor out = at::zeros({first ? 5 : 3, 2});
    world.comm().all_to_all(out, in, first ? std::vector<int64_t>{0, 5} : std::vector<int64_t>{3, 0},
                            first ? std::vector<int64_t>{0, 3} : std::vector<int64_t>{5, 0}).wait();
    EXPECT_TRUE(at::equal(out, at::full_like(out, first ? 2.0 : 1.0)));
  }, GetParam());
}

TEST_P(CommCases, AverageIsOfRanksAndIntegersTruncate) {
  testing::on_threads(3, [](World& world) {
    at::Tensor real = at::full({2}, world.rank() + 1.0, at::kHalf), whole = at::full({2}, world.rank() - 3, at::kLong);
    world.comm().all_reduce(real, ReduceOp::avg).wait();
    world.comm().all_reduce(whole, ReduceOp::avg).wait();
    EXPECT_EQ(real[0].item<double>(), 2.0);
    EXPECT_EQ(whole[0].item<int64_t>(), -2);  // (-3 -2 -1) / 3
  }, GetParam());
}

// A rank with an empty tensor still takes part: nobody waits, and the next call is the same on all.
TEST_P(CommCases, EmptyTensorsKeepRanksInStep) {
  testing::on_threads(3, [](World& world) {
    at::Tensor nothing = at::empty({0, 8}), all_of_nothing = at::empty({0, 24}), one = at::ones({1});
    world.comm().all_reduce(nothing).wait();
    world.comm().all_gather(all_of_nothing, nothing).wait();
    world.comm().all_reduce(one).wait();
    EXPECT_EQ(one.item<double>(), 3);
  }, GetParam());
}

// Two nodes of four ranks, dp 2 x tp 4: a tensor-parallel group stays on a node, and a rank's place on an axis is an index of
// the group, never of the world.
TEST(CommCases, InnermostAxisIsTheNode) {
  for (int rank = 0; rank < 8; ++rank) {
    const World world = World::rehearse(rank, 8);
    const Mesh mesh(world, {{"dp", 2}, {"tp", 4}});
    for (int peer = 0; peer < 4; ++peer) EXPECT_EQ(mesh["tp"].world_rank(peer), rank / 4 * 4 + peer);
    EXPECT_EQ(mesh["tp"].rank(), rank % 4);
    EXPECT_EQ(mesh["dp"].world_rank(1), 4 + rank % 4);
    EXPECT_THROW(mesh["tp"].world_rank(rank < 4 ? 4 : rank), ConfigError);
  }
}

// Messages of a pair complete without wait(), by polling, whatever the order in which their works are looked at.
TEST_P(CommCases, MessagesCompleteByPolling) {
  testing::on_threads(2, [](World& world) {
    const Comm& comm = world.comm();
    const int peer = 1 - world.rank();
    at::Tensor out = at::full({1000}, world.rank() + 1.0), in = at::zeros({1000}), second = at::zeros({3}, at::kLong);
    Work received = comm.recv(in, peer), later = comm.recv(second, peer);
    Work sent = comm.send(out, peer), sent_later = comm.send(at::full({3}, 7, at::kLong), peer);
    while (!later.test()) {
    }
    while (!received.test() || !sent.test() || !sent_later.test()) {
    }
    EXPECT_EQ(in[999].item<double>(), peer + 1.0);
    EXPECT_EQ(second[2].item<int64_t>(), 7);
    received.wait();
  }, GetParam());
}

// Rank 2 fails although nobody waits for it: the ranks that wait for each other's message are told all the same.
TEST_P(CommCases, AFailureEndsWaitsForMessages) {
  const auto start = std::chrono::steady_clock::now();
  std::string text;
  try {
    World::threads(3, [](World& world) {
      world.comm().barrier();
      if (world.rank() == 2) throw std::runtime_error("bad batch");
      at::Tensor t = at::zeros({4});
      try {
        world.comm().recv(t, 1 - world.rank()).wait();
        ADD_FAILURE() << "nobody sends";
      } catch (const CommError& e) {
        EXPECT_EQ(e.failure().peers, std::vector<int>{2}) << e.what();
        EXPECT_NE(e.failure().cause.find("bad batch"), std::string::npos) << e.what();
      }
    }, {.backend = GetParam(), .timeout = std::chrono::minutes(10)});
  } catch (const std::runtime_error& e) {
    text = e.what();
  }
  EXPECT_EQ(text, "bad batch");
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::minutes(1));
}

TEST(CommSplit, ByAFunctionWorksInARehearsalAndByColourIsRefusedThere) {
  const World world = World::rehearse(5, 8);
  const Comm half = world.comm().split([](int rank) { return SplitPlace{.color = rank % 2, .key = -rank}; }, "odd");
  EXPECT_EQ(half.size(), 4);
  EXPECT_EQ(half.rank(), 1);  // 7, 5, 3, 1
  EXPECT_EQ(half.world_rank(0), 7);
  EXPECT_EQ(world.comm().split([](int rank) { return SplitPlace{.color = rank == 5 ? -1 : 0}; }, "others").size(), 1);
  EXPECT_THROW(static_cast<void>(world.comm().split(1, 0, "odd")), ConfigError);
}

// A host program's way to reach all its ranks, as MPI_Bcast does.
class Exchange {
 public:
  explicit Exchange(int ranks) : barrier_(ranks) {}
  Broadcast of(int rank) {
    return [this, rank](void* data, size_t bytes, int root) {
      if (rank == root) bytes_.assign(static_cast<char*>(data), static_cast<char*>(data) + bytes);
      barrier_.arrive_and_wait();
      std::copy(bytes_.begin(), bytes_.end(), static_cast<char*>(data));
      barrier_.arrive_and_wait();
    };
  }

 private:
  std::barrier<> barrier_;
  std::vector<char> bytes_;
};

TEST_P(CommCases, WorldFromAHostProgramsBroadcast) {
  Exchange exchange(3);
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      World world = World::from_mpi(r, 3, exchange.of(r), {.backend = GetParam(), .timeout = testing::kTestTimeout});
      EXPECT_EQ(world.rank(), r);
      EXPECT_EQ(world.local_rank(), r);
      EXPECT_EQ(world.local_size(), 3);
      EXPECT_EQ(world.node(), 0);
      at::Tensor t = at::full({2}, r + 1.0);
      world.comm().all_reduce(t).wait();
      EXPECT_EQ(t[1].item<double>(), 6);
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace
}  // namespace weft
