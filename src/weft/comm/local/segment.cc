#include "weft/comm/local/segment.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "weft/core/error.h"

namespace weft::local {
namespace {

/// Requests from here on are compared with what is free first: the kernel would rather kill a process than refuse. Bytes.
constexpr size_t kCheckFrom = 16 << 20;

std::optional<uint64_t> number_in(const char* path) {
  std::ifstream file(path);
  uint64_t number;
  if (file >> number) return number;
  return std::nullopt;  // "max", or no such file
}

/// What the system and this container (control group version 2) can still give.
uint64_t free_memory() {
  uint64_t available = std::numeric_limits<uint64_t>::max();
  std::ifstream info("/proc/meminfo");
  for (std::string line; std::getline(info, line);) {
    unsigned long long kib;
    if (std::sscanf(line.c_str(), "MemAvailable: %llu kB", &kib) == 1) available = kib << 10;
  }
  const auto limit = number_in("/sys/fs/cgroup/memory.max");
  const auto used = number_in("/sys/fs/cgroup/memory.current");
  if (limit && used) available = std::min(available, *limit > *used ? *limit - *used : 0);
  return available;
}

}  // namespace

UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = other.release();
  }
  return *this;
}

UniqueFd::~UniqueFd() {
  if (fd_ >= 0) ::close(fd_);
}

int UniqueFd::release() { return std::exchange(fd_, -1); }

size_t page_align(size_t bytes) {
  static const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

std::shared_ptr<Segment> Segment::create(size_t bytes) {
  bytes = page_align(bytes);
  // MFD_CLOEXEC: a child program must not keep the memory alive.
  UniqueFd fd(::memfd_create("weft", MFD_CLOEXEC));
  if (!fd) {
    throw ConfigError(fmt::format("memfd_create failed: {}; raise the limit of open files (ulimit -n) if it is small",
                                  std::strerror(errno)));
  }
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    throw ConfigError(fmt::format("cannot size shared memory to {} bytes: {}", bytes, std::strerror(errno)));
  }
  return attach(std::move(fd), bytes);
}

std::shared_ptr<Segment> Segment::attach(UniqueFd fd, size_t bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) {
    throw ConfigError(fmt::format("cannot map {} bytes of shared memory: {}; check ulimit -v and vm.max_map_count", bytes,
                                  std::strerror(errno)));
  }
  return std::shared_ptr<Segment>(new Segment(std::move(fd), static_cast<char*>(data), bytes));
}

Segment::~Segment() { ::munmap(data_, bytes_); }

void Segment::reserve(size_t offset, size_t bytes) {
  if (bytes == 0) return;
  if (bytes >= kCheckFrom) {
    if (const uint64_t available = free_memory(); bytes > available) {
      throw ConfigError(fmt::format("not enough memory for {} bytes of shared memory: {} are available; free memory, raise the "
                                    "container's memory limit, or make buffers smaller", bytes, available));
    }
  }
  int result;
  do {
    result = ::fallocate(fd_.get(), 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result != 0) {
    throw ConfigError(fmt::format("not enough memory for {} bytes of shared memory: {}; free memory, raise the container's "
                                  "memory limit, or make buffers smaller",
                                  bytes, std::strerror(errno)));
  }
}

void Segment::discard(size_t offset, size_t bytes) noexcept {
  if (bytes > 0) ::madvise(data_ + offset, bytes, MADV_REMOVE);  // failure only keeps memory until the last unmapping
}

void Segment::close_fd() { fd_ = UniqueFd(); }

}  // namespace weft::local
