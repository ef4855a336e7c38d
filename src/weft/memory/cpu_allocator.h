// A caching allocator for CPU tensors, with byte counts by category. Nothing changes until it is installed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace weft {

/// Replaces libtorch's CPU allocator for the rest of the process (idempotent, thread-safe). glibc gives large blocks back
/// to the system at every free, so each training step would page-fault its activations again; this one keeps them.
/// Tensors allocated before remain valid and are freed the way they were allocated.
void install_cpu_allocator();

namespace memory {

/// What a block of memory is for. Allocations carry the category of the innermost CategoryScope of their thread.
enum class Category : uint8_t { other, parameters, gradients, optimizer, activations, communication };
inline constexpr size_t kCategories = 6;

/// Tags the allocations of this thread while it lives.
class CategoryScope {
 public:
  explicit CategoryScope(Category category);
  ~CategoryScope();
  CategoryScope(const CategoryScope&) = delete;
  CategoryScope& operator=(const CategoryScope&) = delete;

 private:
  Category outer_;
};

/// Bytes as asked for by tensors (`live`, `peak`, `by_category`), and as kept for reuse (`cached`).
struct Usage {
  int64_t live = 0;
  int64_t peak = 0;         ///< highest `live` since installation or reset_peak()
  int64_t cached = 0;
  int64_t allocations = 0;  ///< all so far
  int64_t reused = 0;       ///< of them served from the cache
  std::array<int64_t, kCategories> by_category{};

  int64_t of(Category category) const { return by_category[static_cast<size_t>(category)]; }
};

/// Counts since install_cpu_allocator(); zeros before.
Usage usage();
void reset_peak();
/// Gives all cached blocks back to the system.
void release_cached();
/// The most that is kept for reuse: a quarter of the machine's memory, so that four ranks on one machine cannot fill it
/// with idle blocks. Past it the cache is emptied and starts again with the sizes then in use.
int64_t cache_limit();

}  // namespace memory
}  // namespace weft
