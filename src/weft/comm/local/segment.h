// Segment: a piece of memory without a name that several processes map (memfd).
#pragma once

#include <cstddef>
#include <memory>

namespace weft::local {

/// Closes its file descriptor.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept;
  ~UniqueFd();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release();

 private:
  int fd_ = -1;
};

/// A mapping of a memfd. A memfd does not count against /dev/shm (Docker's default is 64 MB there). Its size is address
/// space only; memory is taken by reserve(), which fails with an error where an over-full tmpfs would raise SIGBUS later.
class Segment {
 public:
  /// A new segment of zeros. ConfigError when the system refuses.
  static std::shared_ptr<Segment> create(size_t bytes);
  /// Maps what another process created.
  static std::shared_ptr<Segment> attach(UniqueFd fd, size_t bytes);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  char* data() const { return data_; }
  size_t size() const { return bytes_; }
  int fd() const { return fd_.get(); }

  /// Takes memory for a range (again is fine). ConfigError with the number of bytes when there is not enough.
  void reserve(size_t offset, size_t bytes);
  /// Gives the whole pages of a range back to the system for all who map it; they read zeros afterwards.
  void discard(size_t offset, size_t bytes) noexcept;
  /// Drops the descriptor; the mapping stays. No reserve() afterwards.
  void close_fd();

 private:
  Segment(UniqueFd fd, char* data, size_t bytes) : fd_(std::move(fd)), data_(data), bytes_(bytes) {}
  UniqueFd fd_;
  char* data_;
  size_t bytes_;
};

/// `bytes` rounded up to whole pages.
size_t page_align(size_t bytes);

}  // namespace weft::local
