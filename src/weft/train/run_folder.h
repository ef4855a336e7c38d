// The folder of a run. Rank 0 alone writes it.
//
//   config.toml        every key as used, derived sizes filled in; `weft train` takes it again
//   metrics.jsonl      one line per step (metrics.h)
//   events.jsonl       start, finish (done or stopped) and failure, each with its time
//   model.safetensors  weights at the end, by parameter name; with train.ema model_ema.safetensors, their averages
//
// With run.overwrite an earlier run's weights and metrics are kept as *.earlier until this run has saved its own weights.
#pragma once

#include <cstdio>
#include <memory>
#include <string>

#include "weft/train/job.h"
#include "weft/train/metrics.h"

namespace weft::train {

/// What stands in the way of writing the run there; nothing is created. Empty: nothing.
std::string run_folder_problem(const config::OutputConfig& output);

class RunFolder {
 public:
  /// Makes the folder, locks it and writes config.toml. ConfigError when it holds a run or weights and run.overwrite is
  /// false, or when another process is writing a run there. A restarted attempt takes over its own run's folder.
  explicit RunFolder(const Job& job);

  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  void append(const StepRecord& record);
  /// `fields` is a JSON object; "event" and "time" (UTC, ISO 8601) are added in front.
  void event(const std::string& name, const std::string& fields);

  /// To be called when the weights are saved: what was kept of an earlier run goes.
  void finished();

  std::string weights_path(bool averaged = false) const { return path(averaged ? "model_ema.safetensors" : "model.safetensors"); }

 private:
  std::string path(const std::string& name) const { return dir_ + "/" + name; }
  void append_line(const std::string& name, const std::string& line, std::FILE* file);

  using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;
  std::string dir_;
  int lock_ = -1;
  File metrics_, events_;
};

}  // namespace weft::train
