// Accounts of communication memory, with ranks as processes.
#include <gtest/gtest.h>

#include "tests/support/ranks.h"
#include "weft/memory/cpu_allocator.h"

namespace weft {
namespace {

using memory::Category;
using memory::Scope;
using memory::usage;

/// Shared memory is booked like any other, and freed with the tensor.
std::string count_shared_memory(World& world, const std::string&) {
  install_cpu_allocator();
  const Comm& comm = world.comm();
  const memory::Usage start = usage();
  {
    const at::Tensor plain = comm.allocate({1000}, at::kFloat);
    at::Tensor gradients;
    {
      const Scope scope(Category::gradients);
      gradients = comm.allocate({500, 3}, at::kBFloat16);
    }
    EXPECT_EQ(usage().of(Category::communication) - start.of(Category::communication), 4000);
    EXPECT_EQ(usage().of(Category::gradients), 3000);
    const at::Tensor view = gradients.view(-1).narrow(0, 0, 10);
    gradients = at::Tensor();
    EXPECT_EQ(usage().of(Category::gradients), 3000) << "a view keeps the memory";
  }
  EXPECT_EQ(usage().live, start.live);
  return {};
}
const testing::RankBody kCount("count_shared_memory", count_shared_memory);

TEST(MemoryAccounts, SharedMemoryIsBookedOnEveryRank) {
  for (const int ranks : {1, 3}) {
    for (const auto& rank : testing::on_processes(ranks, "count_shared_memory")) EXPECT_EQ(rank.exit_code, 0) << rank.result;
  }
  for (const auto& rank : testing::on_processes(2, "count_shared_memory", "", "gloo")) EXPECT_EQ(rank.exit_code, 0) << rank.result;
}

/// Collectives on buffers of Comm::allocate move bytes and make no tensors.
std::string count_allocations(World& world, const std::string&) {
  install_cpu_allocator();
  const Comm& comm = world.comm();
  const int64_t n = comm.size();
  const at::Tensor part = comm.allocate({5000}, at::kFloat).zero_(), whole = comm.allocate({n * 5000}, at::kFloat).zero_(), plain = at::zeros({n * 5000});
  const int64_t before = usage().allocations;
  for (int i = 0; i < 3; ++i) {
    comm.all_gather(whole, part).released();
    comm.all_gather(plain, part).released();
    comm.reduce_scatter(part, whole).released();
    comm.reduce_scatter(part, plain).released();
    comm.all_reduce(whole).released();
    comm.broadcast(whole, 1).released();
    comm.all_to_all(plain, whole).released();
  }
  EXPECT_EQ(usage().allocations, before);
  return {};
}
const testing::RankBody kCountAllocations("count_allocations", count_allocations);

TEST(MemoryAccounts, CollectivesAllocateNothing) {
  for (const auto& rank : testing::on_processes(3, "count_allocations")) EXPECT_EQ(rank.exit_code, 0) << rank.result;
}

}  // namespace
}  // namespace weft
