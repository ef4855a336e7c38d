#include "weft/memory/block_cache.h"

#include <sys/mman.h>

#include <bit>
#include <cstdlib>

namespace weft::memory {
namespace {

constexpr int kStepsLog2 = 3;
constexpr int kSmallestLog2 = std::bit_width(kSmallestCached) - 1;

void* system_allocate(size_t bytes) {
  void* data = nullptr;
  return posix_memalign(&data, BlockCache::kAlignment, bytes) == 0 ? data : nullptr;
}

/// Null where it would leave less than kHeadroom. Fresh blocks are rare, and the question takes two microseconds.
void* allocate_with_headroom(size_t bytes) {
  void* data = system_allocate(bytes);
  if (data == nullptr || has_headroom()) return data;
  std::free(data);
  return nullptr;
}

}  // namespace

bool has_headroom() {
  void* pages = mmap(nullptr, kHeadroom, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return false;
  munmap(pages, kHeadroom);
  return true;
}

// Class c holds blocks of 2^(16 + c / 8) * (1 + (c % 8) / 8) bytes.
int size_class(size_t bytes) {
  if (bytes <= kSmallestCached) return 0;
  const int octave = std::bit_width(bytes - 1) - 1;  // 2^octave <= bytes - 1 < 2^(octave + 1)
  const auto step = static_cast<int>(((bytes - 1) >> (octave - kStepsLog2)) & ((1 << kStepsLog2) - 1));
  return ((octave - kSmallestLog2) << kStepsLog2) + step + 1;
}

size_t class_bytes(int size_class) {
  const int octave = kSmallestLog2 + (size_class >> kStepsLog2);
  const size_t step = static_cast<size_t>(size_class) & ((1 << kStepsLog2) - 1);
  return (size_t{1} << octave) + (step << (octave - kStepsLog2));
}

BlockCache::Block BlockCache::take(size_t bytes) {
  if (bytes < kSmallestCached) return {system_allocate(bytes), false};
  const int index = size_class(bytes);
  {
    const std::lock_guard lock(mutex_);
    std::vector<void*>& list = free_[static_cast<size_t>(index)];
    if (!list.empty()) {
      void* data = list.back();
      list.pop_back();
      cached_ -= class_bytes(index);
      return {data, true};
    }
  }
  void* data = allocate_with_headroom(class_bytes(index));
  if (data == nullptr) {
    release();
    data = allocate_with_headroom(class_bytes(index));
  }
  return {data, false};
}

void BlockCache::give(void* data, size_t bytes) {
  if (bytes < kSmallestCached) return std::free(data);
  const int index = size_class(bytes);
  std::vector<void*> dropped;
  {
    const std::lock_guard lock(mutex_);
    if (cached_ + class_bytes(index) > limit_) dropped = drain_locked();
    if (class_bytes(index) <= limit_) {
      free_[static_cast<size_t>(index)].push_back(data);
      cached_ += class_bytes(index);
    } else {
      dropped.push_back(data);
    }
  }
  for (void* block : dropped) std::free(block);
}

std::vector<void*> BlockCache::drain_locked() {
  std::vector<void*> all;
  for (std::vector<void*>& list : free_) {
    all.insert(all.end(), list.begin(), list.end());
    list.clear();
  }
  cached_ = 0;
  return all;
}

void BlockCache::release() {
  std::vector<void*> dropped;
  {
    const std::lock_guard lock(mutex_);
    dropped = drain_locked();
  }
  for (void* block : dropped) std::free(block);
}

size_t BlockCache::cached() const {
  const std::lock_guard lock(mutex_);
  return cached_;
}

}  // namespace weft::memory
