#include "weft/memory/cpu_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <unistd.h>

#include <atomic>
#include <mutex>

#include "weft/memory/block_cache.h"

namespace weft {
namespace memory {
namespace {

thread_local Category current_category = Category::other;

/// Lies before every block's data. One cache line, so that the data stay aligned.
struct alignas(BlockCache::kAlignment) Header {
  size_t bytes;  ///< as the tensor asked for
  Category category;
};

struct Counters {
  std::atomic<int64_t> live{0}, peak{0}, allocations{0}, reused{0};
  std::array<std::atomic<int64_t>, kCategories> by_category{};

  void add(size_t bytes, Category category, bool was_reused) {
    const auto n = static_cast<int64_t>(bytes);
    const int64_t now = live.fetch_add(n, std::memory_order_relaxed) + n;
    int64_t seen = peak.load(std::memory_order_relaxed);
    while (now > seen && !peak.compare_exchange_weak(seen, now, std::memory_order_relaxed)) {}
    by_category[static_cast<size_t>(category)].fetch_add(n, std::memory_order_relaxed);
    allocations.fetch_add(1, std::memory_order_relaxed);
    if (was_reused) reused.fetch_add(1, std::memory_order_relaxed);
  }
  void remove(const Header& header) {
    const auto n = static_cast<int64_t>(header.bytes);
    live.fetch_sub(n, std::memory_order_relaxed);
    by_category[static_cast<size_t>(header.category)].fetch_sub(n, std::memory_order_relaxed);
  }
};

size_t machine_memory() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
}

class CachingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_block, c10::Device(c10::kCPU)};
    const BlockCache::Block block = cache.take(bytes + sizeof(Header));
    TORCH_CHECK(block.data != nullptr, "out of memory: no ", bytes, " bytes left for a CPU tensor (", counters.live.load(),
                " bytes are in use by others). Use a smaller micro-batch, recompute or sharding.");
    auto* header = new (block.data) Header{bytes, current_category};
    counters.add(bytes, header->category, block.reused);
    return {header + 1, header + 1, &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, size_t bytes) const override { default_copy_data(target, source, bytes); }

  static void free_block(void* data);

  BlockCache cache{static_cast<size_t>(cache_limit())};
  Counters counters;
};

/// Never destroyed: tensors in static variables are freed after main.
CachingAllocator& allocator() {
  alignas(CachingAllocator) static std::byte storage[sizeof(CachingAllocator)];
  static auto* const instance = new (storage) CachingAllocator;
  return *instance;
}

std::atomic<bool> installed{false};

void CachingAllocator::free_block(void* data) {
  if (data == nullptr) return;
  Header* header = static_cast<Header*>(data) - 1;
  allocator().counters.remove(*header);
  allocator().cache.give(header, header->bytes + sizeof(Header));
}

}  // namespace

CategoryScope::CategoryScope(Category category) : outer_(current_category) { current_category = category; }
CategoryScope::~CategoryScope() { current_category = outer_; }

Usage usage() {
  if (!installed) return {};
  const Counters& counters = allocator().counters;
  Usage usage{.live = counters.live,
              .peak = counters.peak,
              .cached = static_cast<int64_t>(allocator().cache.cached()),
              .allocations = counters.allocations,
              .reused = counters.reused};
  for (size_t i = 0; i < kCategories; ++i) usage.by_category[i] = counters.by_category[i];
  return usage;
}

void reset_peak() {
  if (installed) allocator().counters.peak = allocator().counters.live.load();
}

void release_cached() {
  if (installed) allocator().cache.release();
}

int64_t cache_limit() { return static_cast<int64_t>(machine_memory() / 4); }

}  // namespace memory

void install_cpu_allocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::SetCPUAllocator(&memory::allocator());
    memory::installed = true;
  });
}

}  // namespace weft
