#include "weft/train/run_folder.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <cerrno>
#include <chrono>
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

void make_folder(const std::string& dir, bool overwrite) {
  if (fs::exists(dir + "/metrics.jsonl") && !overwrite) {
    throw ConfigError(
        fmt::format("run.dir = {} holds an earlier run (choose another folder, or set run.overwrite = true)", dir));
  }
  std::error_code failure;
  fs::create_directories(dir, failure);
  if (failure) throw ConfigError(fmt::format("cannot make run.dir = {}: {}", dir, failure.message()));
  // Weights of an earlier run must not look like this one's if it fails.
  fs::remove(dir + "/model.safetensors", failure);
}

}  // namespace

RunFolder::RunFolder(const Job& job)
    : dir_(job.config.run.dir), metrics_(nullptr, &std::fclose), events_(nullptr, &std::fclose) {
  make_folder(dir_, job.config.run.overwrite);
  metrics_.reset(open_or_throw(path("metrics.jsonl")));
  events_.reset(open_or_throw(path("events.jsonl")));
  const File config(open_or_throw(path("config.toml")), &std::fclose);
  append_line("config.toml", config::to_toml(job.config, false), config.get());
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
