#include "weft/memory/account.h"

#include <algorithm>
#include <utility>

namespace weft::memory {
namespace {

thread_local Category category_of_thread = Category::other;

constexpr size_t index(Category category) { return static_cast<size_t>(category); }

}  // namespace

const char* name_of(Category category) {
  static constexpr std::array<const char*, kCategories> kNames{"parameters",  "gradients",     "optimizer",
                                                               "activations", "communication", "other"};
  return kNames[index(category)];
}

Category current_category() { return category_of_thread; }

Scope::Scope(Category category) : outer_(std::exchange(category_of_thread, category)) {}
Scope::~Scope() { category_of_thread = outer_; }

void Account::raise_peaks(size_t category) {
  usage_.peak_of[category] = std::max(usage_.peak_of[category], usage_.live_of[category]);
  if (usage_.live > usage_.peak) {
    usage_.peak = usage_.live;
    usage_.at_peak = usage_.live_of;
  }
}

void Account::add_locked(int64_t bytes, Category category) {
  usage_.live += bytes;
  usage_.live_of[index(category)] += bytes;
  ++usage_.allocations;
  raise_peaks(index(category));
}

bool Account::try_add(int64_t bytes, Category category) {
  const std::lock_guard lock(mutex_);
  if (limit_ > 0 && usage_.live + bytes > limit_) return false;
  add_locked(bytes, category);
  return true;
}

void Account::add(int64_t bytes, Category category) {
  const std::lock_guard lock(mutex_);
  add_locked(bytes, category);
}

void Account::remove(int64_t bytes, Category category) {
  const std::lock_guard lock(mutex_);
  usage_.live -= bytes;
  usage_.live_of[index(category)] -= bytes;
}

void Account::move(int64_t bytes, Category from, Category to) {
  const std::lock_guard lock(mutex_);
  usage_.live_of[index(from)] -= bytes;
  usage_.live_of[index(to)] += bytes;
  raise_peaks(index(to));
}

Usage Account::usage() const {
  const std::lock_guard lock(mutex_);
  return usage_;
}

void Account::reset_peak() {
  const std::lock_guard lock(mutex_);
  usage_.peak = usage_.live;
  usage_.at_peak = usage_.peak_of = usage_.live_of;
}

void Account::set_limit(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  limit_ = bytes;
}

int64_t Account::limit() const {
  const std::lock_guard lock(mutex_);
  return limit_;
}

bool Account::counting() const {
  const std::lock_guard lock(mutex_);
  return counting_;
}

void Account::start() {
  const std::lock_guard lock(mutex_);
  counting_ = true;
}

/// Never destroyed: tensors in static variables are freed after main.
Account& account(Space space) {
  static auto* const accounts = new std::array<Account, 2>;
  return (*accounts)[static_cast<size_t>(space)];
}

Booking::Booking(int64_t bytes, Category unscoped) {
  if (!account(Space::cpu).counting()) return;
  category_ = current_category() == Category::other ? unscoped : current_category();
  account(Space::cpu).add(bytes, category_);
  bytes_ = bytes;
}

Booking::~Booking() {
  if (bytes_ != 0) account(Space::cpu).remove(bytes_, category_);
}

}  // namespace weft::memory
