#include "weft/memory/cpu_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <string_view>

#include "weft/core/error.h"
#include "weft/core/units.h"
#include "weft/memory/block_cache.h"

namespace weft {
namespace memory {
namespace {

/// What an allocation was booked as.
struct Record {
  int64_t bytes;
  Category category;
};

Record book(size_t bytes, Space space) {
  const Record record{static_cast<int64_t>(bytes), current_category()};
  if (!account(space).try_add(record.bytes, record.category)) throw OutOfMemory(record.bytes, space);
  return record;
}

/// Lies before every block's data. One cache line, so that the data stay aligned.
struct alignas(BlockCache::kAlignment) Header {
  Record record;
};

size_t machine_memory() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
}

class CachingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_block, c10::Device(c10::kCPU)};
    const Record record = book(bytes, Space::cpu);
    const BlockCache::Block block = cache.take(bytes + sizeof(Header));
    if (block.data == nullptr) {
      account(Space::cpu).remove(record.bytes, record.category);
      throw OutOfMemory(record.bytes, Space::cpu);
    }
    if (block.reused) reused.fetch_add(1, std::memory_order_relaxed);
    auto* header = new (block.data) Header{record};
    return {header + 1, header + 1, &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, size_t bytes) const override { default_copy_data(target, source, bytes); }

  static Record* record_of(void* data) { return &(static_cast<Header*>(data) - 1)->record; }
  static void free_block(void* data);

  BlockCache cache{static_cast<size_t>(cache_limit())};
  std::atomic<int64_t> reused{0};
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
  const Record record = *record_of(data);
  account(Space::cpu).remove(record.bytes, record.category);
  allocator().cache.give(static_cast<Header*>(data) - 1, static_cast<size_t>(record.bytes) + sizeof(Header));
}

/// Meta tensors have no data; the record is the context of their (null) pointer.
class MetaCounter final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    return {nullptr, new Record(book(bytes, Space::meta)), &forget, c10::Device(c10::kMeta)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {}

  static void forget(void* context) {
    const std::unique_ptr<Record> record(static_cast<Record*>(context));
    account(Space::meta).remove(record->bytes, record->category);
  }
};

std::string text_of(int64_t asked, Category category, const Usage& usage, int64_t limit) {
  const std::string bound = limit > 0 ? " (limit: " + bytes_text(static_cast<double>(limit)) + ")" : "";
  return "out of memory: no room for " + bytes_text(static_cast<double>(asked)) + " of " + name_of(category) + "; tensors hold " +
         bytes_text(static_cast<double>(usage.live)) + bound;
}

}  // namespace

OutOfMemory::OutOfMemory(int64_t bytes, Space space)
    : c10::OutOfMemoryError({__func__, __FILE__, __LINE__},
                            text_of(bytes, current_category(), memory::usage(space), account(space).limit())),
      asked(bytes),
      category(current_category()),
      usage(memory::usage(space)) {}

bool is_lack_of_memory(const std::exception& error) {
  if (dynamic_cast<const Error*>(&error) != nullptr) return false;
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr || dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return true;
  // libtorch's own allocator throws a plain error.
  return std::string_view(error.what()).find("DefaultCPUAllocator") != std::string_view::npos || !has_headroom();
}

void rebook(const at::Tensor& tensor, Category category) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const c10::DataPtr& data = tensor.storage().data_ptr();
  if (data.get_context() == nullptr) return;
  const bool meta = data.get_deleter() == &MetaCounter::forget;
  if (!meta && data.get_deleter() != &CachingAllocator::free_block) return;
  Record* record = meta ? static_cast<Record*>(data.get_context()) : CachingAllocator::record_of(data.get_context());
  account(meta ? Space::meta : Space::cpu).move(record->bytes, record->category, category);
  record->category = category;
}

CacheUsage cache_usage() {
  if (!installed) return {};
  return {.cached = static_cast<int64_t>(allocator().cache.cached()), .reused = allocator().reused.load()};
}

void release_cached() {
  if (installed) allocator().cache.release();
}

int64_t cache_limit() { return static_cast<int64_t>(machine_memory() / 4); }

void install_meta_counter() {
  static std::once_flag once;
  std::call_once(once, [] {
    static auto* const counter = new MetaCounter;
    c10::SetAllocator(c10::kMeta, counter);
    account(Space::meta).start();
  });
}

}  // namespace memory

void install_cpu_allocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::SetCPUAllocator(&memory::allocator());
    memory::account(memory::Space::cpu).start();
    memory::installed = true;
  });
}

}  // namespace weft
