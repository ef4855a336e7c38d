// A file without a name for what does not fit in memory, read and written beside the computation. Knows nothing of torch.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <vector>

namespace weft::memory {

/// The system's calls, to be replaced by tests that make disks fail.
struct FileCalls {
  ssize_t (*read)(int file, void* to, size_t bytes, off_t offset);
  ssize_t (*write)(int file, const void* from, size_t bytes, off_t offset);
  int (*reserve)(int file, off_t offset, off_t bytes);  ///< returns an errno, as posix_fallocate
  static const FileCalls& system();
};

/// What was moved so far, and how long it took.
struct ScratchUse {
  int64_t bytes_read = 0, bytes_written = 0;
  double read_s = 0, write_s = 0;  ///< that the threads spent in the system's calls
  double checksum_s = 0;           ///< and on checksums
  double waited_s = 0;             ///< that wait() stood still: transfers that nothing hid
};

/// Bytes per second, checksums included.
struct ScratchRates {
  double read = 0, write = 0;
};

/// One thread reads and one writes, each in the order of the calls. Every extent has an XXH3 checksum from its write, which its
/// read verifies. All space is reserved when the file is made, and it has no name from the start (or loses it at once where the
/// file system lacks O_TMPFILE), so that nothing is left behind when the process is killed.
///
/// Errors: ConfigError, from the constructor when there is no room (with what is needed, what is free and the remedy) or the
/// folder cannot be written; from wait() when the disk fails or a checksum differs, with the file and the offset.
class ScratchFile {
 public:
  /// `what`: for messages, such as "the optimizer's state of rank 0".
  ScratchFile(const std::string& dir, int64_t bytes, std::string what, const FileCalls& calls = FileCalls::system());
  /// Waits for what is under way.
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  struct Extent {
    int64_t offset = 0;  ///< in the file
    int64_t bytes = 0;
    void* data = nullptr;  ///< in memory, until wait() has returned
  };

  /// Extents are read as they were written: the same offset and size. InternalError for one that never was.
  using Transfer = std::future<void>;
  [[nodiscard]] Transfer read(std::vector<Extent> extents);
  [[nodiscard]] Transfer write(std::vector<Extent> extents);
  /// Returns when `transfer`, if there is one, is done; rethrows what went wrong.
  void wait(Transfer& transfer);

  int64_t bytes() const;
  ScratchUse use() const;
  /// Writes and reads the first `bytes` bytes of the file, from and to `buffer` [part], part by part, to see how fast that is. Before
  /// anything is stored; use() stays as it is.
  ScratchRates measure(void* buffer, int64_t part, int64_t bytes);
  /// Read-only pages of the whole file, valid as long as the pointer. Not while writes are under way.
  std::shared_ptr<const std::byte> map() const;
  /// Verifies the checksum of an extent in mapped pages.
  void check(int64_t offset, int64_t bytes, const std::byte* data) const;

 private:
  struct File;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace weft::memory
