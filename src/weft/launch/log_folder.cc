#include "weft/launch/log_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "weft/core/error.h"

namespace weft::launch {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "weft-run-";

fs::path temporary_parent() {
  std::error_code error;
  fs::path folder = fs::temp_directory_path(error);
  if (error) throw ConfigError(fmt::format("TMPDIR is no folder for logs: {} (set TMPDIR, or give --log-dir)", error.message()));
  return folder;
}

int open_folder(const fs::path& folder) { return ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }

/// Removes a folder unless a run has it locked.
void remove_unused(const fs::path& folder) {
  const int fd = open_folder(folder);
  if (fd < 0) return;
  std::error_code ignored;  // what cannot be removed is no reason not to start
  if (::flock(fd, LOCK_EX | LOCK_NB) == 0) fs::remove_all(folder, ignored);
  ::close(fd);
}

/// Leaves room for one more folder of this user.
void remove_old(const fs::path& parent, size_t kept) {
  std::vector<std::pair<time_t, fs::path>> mine;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(parent, error)) {
    struct stat status {};
    if (!entry.path().filename().string().starts_with(kPrefix) || ::lstat(entry.path().c_str(), &status) != 0) continue;
    if (S_ISDIR(status.st_mode) && status.st_uid == ::getuid()) mine.emplace_back(status.st_mtime, entry.path());
  }
  std::sort(mine.rbegin(), mine.rend());
  for (size_t i = kept; i < mine.size(); ++i) remove_unused(mine[i].second);
}

std::vector<fs::path> files(const fs::path& folder, const std::string& start, const std::string& end) {
  std::vector<fs::path> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(start) && name.ends_with(end)) found.push_back(entry.path());
  }
  return found;
}

std::vector<fs::path> flight_logs(const fs::path& folder) { return files(folder, "flight-rank", ".json"); }

}  // namespace

bool holds_flight_logs(const fs::path& folder) { return !flight_logs(folder).empty(); }

LogFolder::LogFolder(const fs::path& asked, const std::string& run_id) : path_(asked), temporary_(asked.empty()) {
  std::error_code error;
  if (temporary_) {
    const fs::path parent = temporary_parent();
    remove_old(parent, kKeptFolders - 1);
    path_ = parent / (kPrefix + run_id);
    if (::mkdir(path_.c_str(), 0700) != 0) {
      throw ConfigError(fmt::format("{}: cannot be made: {} (set TMPDIR, or give --log-dir)", path_.string(), std::strerror(errno)));
    }
    lock_ = open_folder(path_);
    if (lock_ >= 0) ::flock(lock_, LOCK_SH);
    return;
  }
  fs::create_directories(path_, error);
  if (error) throw ConfigError(fmt::format("--log-dir {}: cannot be made: {}", path_.string(), error.message()));
  lock_ = open_folder(path_);
  if (lock_ >= 0 && ::flock(lock_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    ::close(lock_);
    throw ConfigError(fmt::format("--log-dir {}: another weft run writes its logs there; give this one a folder of its own", path_.string()));
  }
  for (const fs::path& old : files(path_, "rank-", ".log")) fs::remove(old, error);
  for (const fs::path& old : flight_logs(path_)) fs::remove(old, error);
}

LogFolder::~LogFolder() {
  std::error_code ignored;
  if (temporary_ && !kept_) fs::remove_all(path_, ignored);
  if (lock_ >= 0) ::close(lock_);
}

}  // namespace weft::launch
