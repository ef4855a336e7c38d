#include "weft/memory/cpu_allocator.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <torch/types.h>

#include <cstdlib>
#include <new>
#include <thread>

#include "weft/core/error.h"
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

// What is left to kernels and threads, which may crash where they find nothing. In a process of its own: limits cannot be raised again.
TEST(BlockCache, LeavesHeadroomToOthers) {
  EXPECT_TRUE(memory::has_headroom());
  const auto limited = [] {
    rlimit limit{};
    limit.rlim_cur = limit.rlim_max = size_t{1} << 40;
    const auto fits = [&](size_t bytes) {
      void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (pages != MAP_FAILED) munmap(pages, bytes);
      return pages != MAP_FAILED;
    };
    // To where twice the headroom and a bit is free.
    size_t low = 0, high = size_t{1} << 40;
    while (high - low > (size_t{1} << 16)) {
      const size_t middle = low + (high - low) / 2;
      limit.rlim_cur = middle;
      setrlimit(RLIMIT_DATA, &limit);
      (fits(2 * memory::kHeadroom + (size_t{4} << 20)) ? high : low) = middle;
    }
    limit.rlim_cur = high;
    setrlimit(RLIMIT_DATA, &limit);
    memory::BlockCache cache(size_t{1} << 30);
    const bool before = memory::has_headroom();
    const void* first = cache.take(memory::kHeadroom).data;
    const void* second = cache.take(memory::kHeadroom / 2).data;
    std::_Exit(before && first != nullptr && second == nullptr ? 0 : 1);
  };
  EXPECT_EXIT(limited(), ::testing::ExitedWithCode(0), "");
}

TEST(OutOfMemory, IsToldFromOtherErrors) {
  EXPECT_TRUE(memory::is_lack_of_memory(std::bad_alloc()));
  EXPECT_TRUE(memory::is_lack_of_memory(memory::OutOfMemory(1, memory::Space::cpu)));
  EXPECT_TRUE(memory::is_lack_of_memory(std::runtime_error("[enforce fail] DefaultCPUAllocator: can't allocate memory")));
  EXPECT_FALSE(memory::is_lack_of_memory(std::runtime_error("could not create a primitive"))) << "there is memory";
  EXPECT_FALSE(memory::is_lack_of_memory(ConfigError("out of memory")));
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
