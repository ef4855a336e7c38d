#include "weft/train/run_folder.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "weft/config/parse.h"
#include "weft/core/error.h"

namespace weft::train {
namespace {

namespace fs = std::filesystem;

std::FILE* open_or_throw(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (!file) throw ConfigError(fmt::format("cannot write {}: {}", path, std::strerror(errno)));
  return file;
}

std::string utc_now() {
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}",
                     fmt::gmtime(std::chrono::system_clock::to_time_t(std::chrono::system_clock::now())));
}

constexpr const char* kEarlier = ".earlier";
constexpr const char* kKept[] = {"model.safetensors", "model_ema.safetensors", "metrics.jsonl", "events.jsonl", "config.toml"};

/// The launcher starts ranks again after a failure; the folder then holds this very run's last attempt.
bool is_restart() {
  const char* count = std::getenv("TORCHELASTIC_RESTART_COUNT");
  return count != nullptr && std::atoi(count) > 0;
}

/// The deepest folder of `path` that exists: there the missing ones would be made.
fs::path existing_part(fs::path path) {
  std::error_code ignored;
  path = fs::absolute(path, ignored);
  while (!fs::exists(path, ignored) && path.has_parent_path() && path != path.parent_path()) path = path.parent_path();
  return path;
}

/// Two runs in one folder would mix their files. The lock ends with the process, whatever happens to it.
int lock_folder(const std::string& dir) {
  const int folder = open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) throw ConfigError(fmt::format("cannot open run.dir = {}: {}", dir, std::strerror(errno)));
  if (flock(folder, LOCK_EX | LOCK_NB) == 0) return folder;
  const int reason = errno;
  close(folder);
  if (reason != EWOULDBLOCK) return -1;  // a file system without locks
  throw ConfigError(fmt::format("another process is writing a run to run.dir = {} (choose another folder)", dir));
}

}  // namespace

std::string run_folder_problem(const config::OutputConfig& output) {
  std::error_code ignored;
  for (const char* name : kKept) {
    if (output.overwrite || is_restart() || !fs::exists(output.dir + "/" + name, ignored)) continue;
    return fmt::format("run.dir = {} holds an earlier run ({}); choose another folder, or set run.overwrite = true", output.dir,
                       name);
  }
  const fs::path base = existing_part(output.dir);
  if (!fs::is_directory(base, ignored)) return fmt::format("run.dir = {}: {} is no folder", output.dir, base.string());
  if (access(base.c_str(), W_OK | X_OK) != 0)
    return fmt::format("cannot write run.dir = {}: {}: {}", output.dir, base.string(), std::strerror(errno));
  return {};
}

RunFolder::RunFolder(const Job& job)
    : dir_(job.config.run.dir), metrics_(nullptr, &std::fclose), events_(nullptr, &std::fclose) {
  const std::string problem = run_folder_problem(job.config.run);
  if (!problem.empty()) throw ConfigError(problem);
  std::error_code failure;
  fs::create_directories(dir_, failure);
  if (failure) throw ConfigError(fmt::format("cannot make run.dir = {}: {}", dir_, failure.message()));
  lock_ = lock_folder(dir_);
  // Weights of an earlier run must not look like this one's if it fails; nor may they be lost if it does.
  for (const char* name : kKept) {
    if (fs::exists(path(name))) fs::rename(path(name), path(name) + kEarlier, failure);
    if (failure) throw ConfigError(fmt::format("cannot rename {}: {}", path(name), failure.message()));
  }
  metrics_.reset(open_or_throw(path("metrics.jsonl")));
  events_.reset(open_or_throw(path("events.jsonl")));
  const File config(open_or_throw(path("config.toml")), &std::fclose);
  append_line("config.toml", config::to_toml(job.config, false), config.get());
}

RunFolder::~RunFolder() {
  if (lock_ >= 0) close(lock_);
}

void RunFolder::finished() {
  std::error_code ignored;
  for (const char* name : kKept) fs::remove(path(name) + kEarlier, ignored);
}

void RunFolder::append(const StepRecord& record) {
  append_line("metrics.jsonl", to_json(record), metrics_.get());
}

void RunFolder::event(const std::string& name, const std::string& fields) {
  nlohmann::ordered_json line{{"event", name}, {"time", utc_now()}};
  line.update(nlohmann::ordered_json::parse(fields));
  append_line("events.jsonl", line.dump(), events_.get());
}

// Flushed line by line: whoever follows the file sees whole steps, and a kill loses none.
void RunFolder::append_line(const std::string& name, const std::string& line, std::FILE* file) {
  if (std::fputs(line.c_str(), file) < 0 || std::fputc('\n', file) == EOF || std::fflush(file) != 0) {
    throw ConfigError(fmt::format("cannot write {}: {}", path(name), std::strerror(errno)));
  }
}

}  // namespace weft::train
