// Free lists of large blocks by size class. Knows nothing of torch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace weft::memory {

/// Blocks below this size are left to malloc, which reuses them well.
inline constexpr size_t kSmallestCached = size_t{64} << 10;

/// Size classes: 8 steps per power of two, so at most one eighth of a block is wasted.
int size_class(size_t bytes);
/// Bytes of the blocks of a class: the smallest class size >= bytes is class_bytes(size_class(bytes)).
size_t class_bytes(int size_class);

/// What tensors leave to everybody else: kernels generate code, take scratch and start threads, and where they find nothing some of
/// them crash instead of saying so (oneDNN's code generator).
inline constexpr size_t kHeadroom = size_t{24} << 20;
/// Whether the system would still give kHeadroom to this process (ulimit -d and -v, strict overcommit).
bool has_headroom();

/// Thread-safe. Memory is aligned to kAlignment.
class BlockCache {
 public:
  static constexpr size_t kAlignment = 64;

  explicit BlockCache(size_t limit) : limit_(limit) {}
  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;
  ~BlockCache() { release(); }

  struct Block {
    void* data = nullptr;  ///< null: the system has no memory left, or less than kHeadroom besides the block
    bool reused = false;
  };
  /// A block of at least `bytes` bytes.
  Block take(size_t bytes);
  /// `bytes` as given to take().
  void give(void* data, size_t bytes);
  /// Frees everything cached.
  void release();
  size_t cached() const;
  size_t limit() const { return limit_; }

 private:
  std::vector<void*> drain_locked();

  static constexpr int kClasses = 8 * 48;  ///< up to 2^64 bytes
  const size_t limit_;
  mutable std::mutex mutex_;
  size_t cached_ = 0;
  std::array<std::vector<void*>, kClasses> free_;
};

}  // namespace weft::memory
