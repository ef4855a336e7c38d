#include "weft/memory/cpu_allocator.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <thread>

#include "weft/memory/block_cache.h"

namespace weft {
namespace {

constexpr size_t kBig = size_t{1} << 20;

TEST(BlockCache, ClassesCoverEverySizeWithAnEighthOfWaste) {
  for (size_t bytes = memory::kSmallestCached; bytes < (size_t{1} << 34); bytes += bytes / 7 + 13) {
    const size_t given = memory::class_bytes(memory::size_class(bytes));
    ASSERT_GE(given, bytes);
    ASSERT_LE(given - bytes, bytes / 8 + 1);
    ASSERT_EQ(memory::size_class(given), memory::size_class(bytes));
  }
}

TEST(BlockCache, ReusesBlocksAndStaysWithinItsLimit) {
  memory::BlockCache cache(3 * kBig);
  const auto first = cache.take(kBig);
  EXPECT_FALSE(first.reused);
  cache.give(first.data, kBig);
  const auto second = cache.take(kBig);
  EXPECT_TRUE(second.reused);
  EXPECT_EQ(second.data, first.data);
  cache.give(second.data, kBig);
  std::vector<void*> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(cache.take(kBig).data);
  for (void* block : blocks) {
    cache.give(block, kBig);
    EXPECT_LE(cache.cached(), cache.limit());
  }
  cache.give(cache.take(8 * kBig).data, 8 * kBig);  // larger than the limit: not kept
  EXPECT_LE(cache.cached(), cache.limit());
  cache.release();
  EXPECT_EQ(cache.cached(), 0U);
}

// One test installs, because installation lasts for the process.
TEST(CpuAllocator, CountsCachesAndServesThreads) {
  EXPECT_EQ(memory::usage().allocations, 0);
  torch::Tensor before = torch::full({300000}, 3.0F);
  install_cpu_allocator();
  install_cpu_allocator();
  EXPECT_EQ(before.sum().item<float>(), 900000);
  before.reset();  // freed the way it was allocated
  const memory::Usage start = memory::usage();
  EXPECT_EQ(start.live, 0);

  {
    const memory::Scope scope(memory::Category::optimizer);
    const auto a = torch::empty({1 << 20}, torch::kByte);
    {
      const memory::Scope inner(memory::Category::gradients);
      const auto b = torch::empty({100}, torch::kByte);
      EXPECT_EQ(memory::usage().of(memory::Category::gradients), 100);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(b.data_ptr()) % 64, 0U);
    }
    EXPECT_EQ(memory::usage().of(memory::Category::gradients), 0);
    EXPECT_EQ(memory::usage().of(memory::Category::optimizer), 1 << 20);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data_ptr()) % 64, 0U);
  }
  EXPECT_EQ(memory::usage().live, 0);
  EXPECT_GE(memory::usage().peak, (1 << 20) + 100);
  EXPECT_GT(memory::cache_usage().cached, 0);
  const int64_t reused = memory::cache_usage().reused;
  torch::empty({1 << 20}, torch::kByte);
  EXPECT_EQ(memory::cache_usage().reused, reused + 1);
  EXPECT_EQ(torch::empty({0}).numel(), 0);

  // Blocks wander between threads; contents stay apart.
  std::vector<std::thread> threads;
  std::vector<torch::Tensor> handed(4);
  std::atomic<int> wrong{0};
  for (int id = 0; id < 4; ++id)
    threads.emplace_back([&, id] {
      for (int i = 0; i < 200; ++i) {
        const auto t = torch::full({20000 + 1000 * (i % 7)}, static_cast<float>(id));
        if (t.min().item<float>() != id || t.max().item<float>() != id) ++wrong;
        handed[static_cast<size_t>(id)] = t;
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  handed.clear();
  EXPECT_EQ(memory::usage().live, 0);
  memory::release_cached();
  EXPECT_EQ(memory::cache_usage().cached, 0);
  memory::reset_peak();
  EXPECT_EQ(memory::usage().peak, 0);
}

}  // namespace
}  // namespace weft
