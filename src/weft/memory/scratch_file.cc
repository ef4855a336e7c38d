#include "weft/memory/scratch_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "weft/core/error.h"
#include "weft/core/units.h"

namespace weft::memory {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::string size_text(int64_t bytes) { return bytes_text(static_cast<double>(bytes)); }

/// Runs tasks one after the other.
class Worker {
 public:
  Worker() : thread_([this] { run(); }) {}
  ~Worker() {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  std::future<void> run(std::function<void()> task) {
    std::packaged_task<void()> packaged(std::move(task));
    std::future<void> done = packaged.get_future();
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(packaged));
    }
    changed_.notify_one();
    return done;
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return ends_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      std::packaged_task<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::packaged_task<void()>> tasks_;
  bool ends_ = false;
  std::thread thread_;
};

int open_without_name(const std::string& dir) {
  int file = open(dir.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | O_EXCL, 0600);
  if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return file;
  std::string name = dir + "/weft-offload-XXXXXX";
  file = mkostemp(name.data(), O_CLOEXEC);
  if (file >= 0) unlink(name.c_str());
  return file;
}

}  // namespace

const FileCalls& FileCalls::system() {
  static const FileCalls calls{.read = ::pread, .write = ::pwrite, .reserve = ::posix_fallocate};
  return calls;
}

/// An open file.
struct ScratchFile::File {
  explicit File(int opened) : number(opened) {}
  ~File() {
    if (number >= 0) close(number);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int number;
};

struct ScratchFile::State {
  explicit State(const std::string& folder) : dir(folder), file(open_without_name(folder)) {}

  std::string dir, what;
  int64_t bytes = 0;
  FileCalls calls;
  File file;
  mutable std::mutex mutex;  // of what follows
  std::unordered_map<int64_t, std::pair<int64_t, uint64_t>> sums;  // offset -> bytes, checksum
  ScratchUse use;
  Worker reader, writer;  // last: they end before what they use is gone

  void reserve();
  [[noreturn]] void fail(const char* action, int64_t offset, int64_t count, const std::string& reason) const;
  void read(const Extent& extent);
  void write(const Extent& extent);
  void check(int64_t offset, int64_t count, const void* data);
};

/// The free space is compared first: a file system that has too little may be filled to the brim before it says so.
void ScratchFile::State::reserve() {
  const std::string remedy = "Free space there, choose another folder (offload.dir), share the state over more ranks (parallel.zero), or "
                             "keep it in memory (offload.optimizer = \"none\"). Nothing was written";
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && static_cast<uint64_t>(bytes) > limit.rlim_cur) {
    throw ConfigError(fmt::format("no room for {} in {}: it needs a file of {}, and this process may write files of {} (ulimit -f). {}",
                                  what, dir, size_text(bytes), size_text(static_cast<int64_t>(limit.rlim_cur)), remedy));
  }
  struct statvfs space {};
  const bool known = fstatvfs(file.number, &space) == 0;
  const auto room = static_cast<int64_t>(space.f_bavail) * static_cast<int64_t>(space.f_frsize);
  int reason = known && room < bytes ? ENOSPC : 0;
  if (reason == 0 && bytes > 0) reason = calls.reserve(file.number, 0, bytes);
  if (reason == 0) return;
  throw ConfigError(fmt::format("no room for {} in {}: it needs {}, {} are free ({}). {}", what, dir, size_text(bytes),
                                known ? size_text(room) : "an unknown number of bytes", std::strerror(reason), remedy));
}

void ScratchFile::State::fail(const char* action, int64_t offset, int64_t count, const std::string& reason) const {
  throw ConfigError(fmt::format("cannot {} {} of the file in {} that holds {}, at offset {}: {}. The state in it is lost: check the "
                                "disk (dmesg, smartctl), or set offload.dir to another, and start again",
                                action, size_text(count), dir, what, offset, reason));
}

void ScratchFile::State::check(int64_t offset, int64_t count, const void* data) {
  const auto start = Clock::now();
  const uint64_t sum = XXH3_64bits(data, static_cast<size_t>(count));
  const std::lock_guard lock(mutex);
  use.checksum_s += seconds_since(start);
  const auto found = sums.find(offset);
  if (found == sums.end() || found->second.first != count) {
    throw InternalError(fmt::format("{} bytes at offset {} of {} were never written as such", count, offset, what));
  }
  if (found->second.second == sum) return;
  fail("trust", offset, count, fmt::format("its checksum is {:016x}, {:016x} was written", sum, found->second.second));
}

void ScratchFile::State::read(const Extent& extent) {
  const auto start = Clock::now();
  auto* to = static_cast<std::byte*>(extent.data);
  for (int64_t done = 0; done < extent.bytes;) {
    const ssize_t got = calls.read(file.number, to + done, static_cast<size_t>(extent.bytes - done), extent.offset + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read", extent.offset + done, extent.bytes - done, std::strerror(errno));
    if (got == 0) fail("read", extent.offset + done, extent.bytes - done, "the file has become shorter");
    done += got;
  }
  {
    const std::lock_guard lock(mutex);
    use.bytes_read += extent.bytes;
    use.read_s += seconds_since(start);
  }
  check(extent.offset, extent.bytes, extent.data);
}

void ScratchFile::State::write(const Extent& extent) {
  auto start = Clock::now();
  const uint64_t sum = XXH3_64bits(extent.data, static_cast<size_t>(extent.bytes));
  const double checksum_s = seconds_since(start);
  start = Clock::now();
  const auto* from = static_cast<const std::byte*>(extent.data);
  for (int64_t done = 0; done < extent.bytes;) {
    const ssize_t put = calls.write(file.number, from + done, static_cast<size_t>(extent.bytes - done), extent.offset + done);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail("write", extent.offset + done, extent.bytes - done, std::strerror(errno));
    done += put;
  }
  const std::lock_guard lock(mutex);
  use.bytes_written += extent.bytes;
  use.write_s += seconds_since(start);
  use.checksum_s += checksum_s;
  sums[extent.offset] = {extent.bytes, sum};
}

ScratchFile::ScratchFile(const std::string& dir, int64_t bytes, std::string what, const FileCalls& calls) : state_(std::make_unique<State>(dir)) {
  state_->what = std::move(what);
  state_->bytes = bytes;
  state_->calls = calls;
  if (state_->file.number < 0) {
    throw ConfigError(fmt::format("cannot make a file in {} for {}: {}. Name a folder that exists and may be written (offload.dir)",
                                  state_->dir, state_->what, std::strerror(errno)));
  }
  state_->reserve();
}

ScratchFile::~ScratchFile() = default;

ScratchFile::Transfer ScratchFile::read(std::vector<Extent> extents) {
  return state_->reader.run([state = state_.get(), extents = std::move(extents)] {
    for (const Extent& extent : extents) state->read(extent);
  });
}

ScratchFile::Transfer ScratchFile::write(std::vector<Extent> extents) {
  return state_->writer.run([state = state_.get(), extents = std::move(extents)] {
    for (const Extent& extent : extents) state->write(extent);
  });
}

void ScratchFile::wait(Transfer& transfer) {
  if (!transfer.valid()) return;
  const auto start = Clock::now();
  transfer.wait();
  {
    const std::lock_guard lock(state_->mutex);
    state_->use.waited_s += seconds_since(start);
  }
  transfer.get();
}

int64_t ScratchFile::bytes() const { return state_->bytes; }

ScratchUse ScratchFile::use() const {
  const std::lock_guard lock(state_->mutex);
  return state_->use;
}

ScratchRates ScratchFile::measure(void* buffer, int64_t part, int64_t bytes) {
  std::vector<Extent> extents;
  for (int64_t at = 0; at < bytes; at += part) extents.push_back({.offset = at, .bytes = std::min(part, bytes - at), .data = buffer});
  const auto rate = [&](Transfer (ScratchFile::*move)(std::vector<Extent>)) {
    const auto start = Clock::now();
    (this->*move)(extents).get();
    return static_cast<double>(bytes) / seconds_since(start);
  };
  ScratchRates rates;
  rates.write = rate(&ScratchFile::write);
  rates.read = rate(&ScratchFile::read);
  const std::lock_guard lock(state_->mutex);
  state_->sums.clear();
  state_->use = {};
  return rates;
}

std::shared_ptr<const std::byte> ScratchFile::map() const {
  const auto size = static_cast<size_t>(state_->bytes);
  void* pages = mmap(nullptr, size, PROT_READ, MAP_SHARED, state_->file.number, 0);
  if (pages == MAP_FAILED) state_->fail("map", 0, state_->bytes, std::strerror(errno));
  return {static_cast<const std::byte*>(pages), [size](const std::byte* p) { munmap(const_cast<std::byte*>(p), size); }};
}

void ScratchFile::check(int64_t offset, int64_t bytes, const std::byte* data) const { state_->check(offset, bytes, data); }

}  // namespace weft::memory
