// A caching allocator for CPU tensors, and a counter for meta tensors, that keep the accounts of account.h. Nothing changes
// until they are installed.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <exception>

#include "weft/memory/account.h"

namespace weft {

/// Replaces libtorch's CPU allocator for the rest of the process (idempotent, thread-safe). glibc gives large blocks back
/// to the system at every free, so each training step would page-fault its activations again; this one keeps them.
/// Tensors allocated before remain valid and are freed the way they were allocated.
void install_cpu_allocator();

namespace memory {

/// Counts meta tensors from now on (idempotent, thread-safe): the same program on the meta device has the bytes of the
/// real one, and no memory.
void install_meta_counter();

/// Thrown by an allocation for which there is no memory, or no room below the limit. `usage` is of that moment: unwinding
/// frees much of it. "Use a smaller micro-batch" and the like is for those who catch it.
class OutOfMemory : public c10::OutOfMemoryError {
 public:
  OutOfMemory(int64_t asked, Space space);

  int64_t asked;      ///< bytes of the tensor that did not fit
  Category category;  ///< what it was for
  Usage usage;
};

/// Whether `error` says that there was no memory: an allocator's, of this library or libtorch's, the language's, or, when the system
/// has next to nothing left, whatever a kernel or a thread's start makes of that. Errors of Weft's own kinds mean what they say.
bool is_lack_of_memory(const std::exception& error);

/// From now on `tensor`'s storage belongs to `category` (for memory that others allocated, such as gradients that autograd
/// made). No-op for storage that no installed allocator of ours gave out.
void rebook(const at::Tensor& tensor, Category category);

/// What the caching allocator keeps.
struct CacheUsage {
  int64_t cached = 0;  ///< bytes kept for reuse
  int64_t reused = 0;  ///< allocations served from them so far
};
CacheUsage cache_usage();
/// Gives all cached blocks back to the system.
void release_cached();
/// The most that is kept for reuse: a quarter of the machine's memory, so that four ranks on one machine cannot fill it
/// with idle blocks. Past it the cache is emptied and starts again with the sizes then in use.
int64_t cache_limit();

}  // namespace memory
}  // namespace weft
