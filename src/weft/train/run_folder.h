// The folder of a run. Rank 0 alone writes it.
//
//   config.toml        every key as used, derived sizes filled in; `weft train` takes it again
//   metrics.jsonl      one line per step (metrics.h)
//   events.jsonl       start, finish (done or stopped) and failure, each with its time
//   model.safetensors  weights at the end, by parameter name
#pragma once

#include <cstdio>
#include <memory>
#include <string>

#include "weft/train/job.h"
#include "weft/train/metrics.h"

namespace weft::train {

class RunFolder {
 public:
  /// Makes the folder and writes config.toml. ConfigError when it holds a run and run.overwrite is false.
  explicit RunFolder(const Job& job);

  void append(const StepRecord& record);
  /// `fields` is a JSON object; "event" and "time" (UTC, ISO 8601) are added in front.
  void event(const std::string& name, const std::string& fields);

  std::string weights_path() const { return path("model.safetensors"); }

 private:
  std::string path(const std::string& name) const { return dir_ + "/" + name; }
  void append_line(const std::string& name, const std::string& line, std::FILE* file);

  using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;
  std::string dir_;
  File metrics_, events_;
};

}  // namespace weft::train
