#include "weft/memory/scratch_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <functional>
#include <numeric>

#include "tests/support/temp_dir.h"
#include "weft/core/error.h"

namespace weft::memory {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::weft::testing::TempDir;

std::string message_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no ConfigError";
}

/// Writes 1000 bytes at 64 and reads them back.
std::vector<unsigned char> round_trip(const std::string& dir, const FileCalls& calls, ScratchUse* use = nullptr) {
  ScratchFile file(dir, 4096, "the state of a test", calls);
  std::vector<unsigned char> bytes(1000), back(1000);
  std::iota(bytes.begin(), bytes.end(), static_cast<unsigned char>(0));
  ScratchFile::Transfer written = file.write({{.offset = 64, .bytes = 400, .data = bytes.data()},
                                              {.offset = 464, .bytes = 600, .data = bytes.data() + 400}});
  file.wait(written);
  ScratchFile::Transfer read = file.read({{.offset = 64, .bytes = 400, .data = back.data()},
                                          {.offset = 464, .bytes = 600, .data = back.data() + 400}});
  file.wait(read);
  EXPECT_EQ(bytes, back);
  file.wait(read);  // nothing is under way: returns
  if (use != nullptr) *use = file.use();
  return back;
}

TEST(ScratchFile, ReadsWhatItWroteAndLeavesNoName) {
  const TempDir dir;
  ScratchUse use;
  round_trip(dir.path(), FileCalls::system(), &use);
  EXPECT_EQ(use.bytes_read, 1000);
  EXPECT_EQ(use.bytes_written, 1000);
  ScratchFile file(dir.path(), 1 << 20, "the state of a test");
  EXPECT_EQ(file.bytes(), 1 << 20);
  EXPECT_TRUE(std::filesystem::is_empty(dir.path())) << "a kill would leave it behind";
  char byte = 0;
  ScratchFile::Transfer never = file.read({{.offset = 0, .bytes = 1, .data = &byte}});
  EXPECT_THROW(file.wait(never), InternalError);
}

TEST(ScratchFile, MeasuringTheDiskLeavesNothing) {
  const TempDir dir;
  ScratchFile file(dir.path(), 10000, "the state of a test");
  std::vector<char> buffer(4096);
  const ScratchRates rates = file.measure(buffer.data(), 4096, 10000);
  EXPECT_GT(rates.read, 0);
  EXPECT_GT(rates.write, 0);
  EXPECT_EQ(file.use().bytes_read, 0);
  ScratchFile::Transfer never = file.read({{.offset = 0, .bytes = 4096, .data = buffer.data()}});
  EXPECT_THROW(file.wait(never), InternalError);
}

TEST(ScratchFile, PagesAreTheFile) {
  const TempDir dir;
  ScratchFile file(dir.path(), 8192, "the state of a test");
  std::vector<int> numbers(1024, 7);
  ScratchFile::Transfer written = file.write({{.offset = 4096, .bytes = 4096, .data = numbers.data()}});
  file.wait(written);
  const auto pages = file.map();
  file.check(4096, 4096, pages.get() + 4096);
  EXPECT_EQ(*reinterpret_cast<const int*>(pages.get() + 4096), 7);
  numbers[3] = 8;
  EXPECT_THAT(message_of([&] { file.check(4096, 4096, reinterpret_cast<const std::byte*>(numbers.data())); }), HasSubstr("checksum"));
}

TEST(ScratchFile, TransfersThatTheSystemCutsShortGoOn) {
  const TempDir dir;
  FileCalls calls = FileCalls::system();
  calls.read = [](int file, void* to, size_t bytes, off_t offset) { return ::pread(file, to, std::min<size_t>(bytes, 7), offset); };
  calls.write = [](int file, const void* from, size_t bytes, off_t offset) { return ::pwrite(file, from, std::min<size_t>(bytes, 300), offset); };
  round_trip(dir.path(), calls);
}

TEST(ScratchFile, DisksThatFailAreNamedWithTheOffset) {
  const TempDir dir;
  FileCalls reads = FileCalls::system(), writes = reads, flips = reads, ends = reads;
  reads.read = [](int, void*, size_t, off_t) -> ssize_t { return errno = EIO, -1; };
  writes.write = [](int file, const void* from, size_t bytes, off_t offset) -> ssize_t {
    return offset < 464 ? ::pwrite(file, from, bytes, offset) : (errno = EIO, -1);
  };
  flips.read = [](int file, void* to, size_t bytes, off_t offset) {
    const ssize_t got = ::pread(file, to, bytes, offset);
    if (offset <= 464 && 464 < offset + got) static_cast<char*>(to)[464 - offset] ^= 4;
    return got;
  };
  ends.read = [](int, void*, size_t, off_t) -> ssize_t { return 0; };
  const auto failing = [&](const FileCalls& calls) { return message_of([&] { round_trip(dir.path(), calls); }); };
  EXPECT_THAT(failing(reads), AllOf(HasSubstr("cannot read"), HasSubstr(dir.path()), HasSubstr("offset 64: Input/output error")));
  EXPECT_THAT(failing(writes), AllOf(HasSubstr("cannot write"), HasSubstr("the state of a test"), HasSubstr("offset 464: Input/output error")));
  EXPECT_THAT(failing(flips), AllOf(HasSubstr("checksum"), HasSubstr("offset 464"), HasSubstr(dir.path())));
  EXPECT_THAT(failing(ends), HasSubstr("shorter"));
}

TEST(ScratchFile, NoRoomIsSaidAtTheStart) {
  const TempDir dir;
  const auto error = [&](int64_t bytes, const FileCalls& calls) {
    return message_of([&] { ScratchFile file(dir.path(), bytes, "the state of a test", calls); });
  };
  const std::string huge = error(int64_t{1} << 60, FileCalls::system());
  EXPECT_THAT(huge, AllOf(HasSubstr("it needs 1024 PiB"), HasSubstr("are free (No space left"), HasSubstr("offload.dir")));
  FileCalls full = FileCalls::system();
  full.reserve = [](int, off_t, off_t) { return ENOSPC; };  // another process was faster
  EXPECT_THAT(error(1000, full), HasSubstr("No space left"));
  EXPECT_THAT(message_of([&] { ScratchFile file(dir / "missing", 10, "the state of a test"); }),
              AllOf(HasSubstr(dir / "missing"), HasSubstr("No such file or directory")));
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{.rlim_cur = 1 << 16, .rlim_max = before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const std::string limited = error(1 << 20, FileCalls::system());
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_THAT(limited, AllOf(HasSubstr("ulimit -f"), HasSubstr("64 KiB")));
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

}  // namespace
}  // namespace weft::memory
