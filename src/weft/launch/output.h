// What a rank prints: into its log file, its last lines kept for the report of a failure, and shown live if asked.
#pragma once

#include <cstdio>
#include <deque>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

namespace weft::launch {

/// How a rank's output is shown while it runs.
enum class Show {
  no,        ///< log file only
  raw,       ///< bytes as they come, so that a progress line is rewritten as usual
  prefixed,  ///< whole lines behind "[rank] "
};

/// The output of one rank. Lines of its stdout and stderr stand in one log file in the order in which they came.
class RankOutput {
 public:
  RankOutput(int rank, const std::filesystem::path& log, Show show);

  enum Stream { out, err };
  void take(Stream stream, std::string_view bytes);
  /// Treats what came last as a line although no newline followed.
  void finish();

  const std::filesystem::path& log() const { return log_; }
  /// The last lines, oldest first, none empty at the end.
  const std::deque<std::string>& tail() const { return tail_; }

 private:
  void line(Stream stream, std::string text);
  void flush_log();

  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  int rank_;
  std::filesystem::path log_;
  Show show_;
  bool log_incomplete_ = false;
  std::unique_ptr<std::FILE, Close> file_;
  std::string unfinished_[2];
  std::deque<std::string> tail_;
};

}  // namespace weft::launch
