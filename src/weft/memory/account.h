// Bytes of tensors by what they are for: live now, at the peak, and per category. Knows nothing of torch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

namespace weft::memory {

/// What a block of memory is for. An allocation carries the category of the innermost Scope of its thread, and its free is
/// booked to that category wherever it happens.
enum class Category : uint8_t { parameters, gradients, optimizer, activations, communication, other };
inline constexpr size_t kCategories = 6;
/// "parameters", "gradients", ...
const char* name_of(Category category);

/// Of this thread; Category::other outside of any Scope. Backward on CPU runs on the thread that called it, so a scope
/// around backward() covers what backward allocates.
Category current_category();

/// Sets the category of this thread's allocations while it lives.
class Scope {
 public:
  explicit Scope(Category category);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  Category outer_;
};

using Amounts = std::array<int64_t, kCategories>;

/// Bytes as tensors asked for them (storage nbytes), without rounding and without what is kept for reuse.
struct Usage {
  int64_t live = 0;
  int64_t peak = 0;          ///< highest `live` since counting began, or since reset_peak()
  int64_t allocations = 0;   ///< all so far
  Amounts live_of{};         ///< by category; sums to `live`
  Amounts at_peak{};         ///< by category at the moment of `peak`; sums to it
  Amounts peak_of{};         ///< each category's own peak; they need not coincide

  int64_t of(Category category) const { return live_of[static_cast<size_t>(category)]; }
  int64_t peak_by(Category category) const { return peak_of[static_cast<size_t>(category)]; }
};

/// Counts that belong together. Thread-safe; exact under concurrency.
class Account {
 public:
  /// False, and nothing booked, if `live` would exceed the limit.
  bool try_add(int64_t bytes, Category category);
  /// Books memory that exists already, whatever the limit.
  void add(int64_t bytes, Category category);
  void remove(int64_t bytes, Category category);
  /// Moves live bytes to another category.
  void move(int64_t bytes, Category from, Category to);
  Usage usage() const;
  /// Peaks start again from what is live.
  void reset_peak();
  /// 0: none.
  void set_limit(int64_t bytes);
  int64_t limit() const;
  /// Whether somebody counts into it; bookings of others are dropped before.
  bool counting() const;
  void start();

 private:
  void add_locked(int64_t bytes, Category category);
  void raise_peaks(size_t category);

  mutable std::mutex mutex_;
  Usage usage_;
  int64_t limit_ = 0;
  bool counting_ = false;
};

/// Where the bytes lie: in this machine's memory, or nowhere (meta tensors, which have shapes only).
enum class Space { cpu, meta };
Account& account(Space space);

/// Zeros until install_cpu_allocator() or install_meta_counter().
inline Usage usage(Space space = Space::cpu) { return account(space).usage(); }
inline void reset_peak(Space space = Space::cpu) { account(space).reset_peak(); }
/// Allocations that would bring `live` above `bytes` fail as if the machine had no more memory (0: no limit).
inline void set_limit(int64_t bytes, Space space = Space::cpu) { account(space).set_limit(bytes); }

/// Books memory that no tensor allocator gave out (shared or device memory) while it lives. The limit counts it, but does
/// not refuse it.
class Booking {
 public:
  /// In `unscoped` when this thread has no Scope. No-op when nobody counts.
  Booking(int64_t bytes, Category unscoped);
  ~Booking();
  Booking(const Booking&) = delete;
  Booking& operator=(const Booking&) = delete;

 private:
  int64_t bytes_ = 0;
  Category category_ = Category::other;
};

}  // namespace weft::memory
