// The folder of a run's logs, and what becomes of the folders of earlier runs.
#pragma once

#include <filesystem>
#include <string>

namespace weft::launch {

/// - Asked for with --log-dir: it holds the logs of one run at a time. Those of an earlier one go when the next begins; the folder
///   itself is never removed.
/// - Else TMPDIR/weft-run-ID, for this user only. It goes with the object unless keep() was called. The newest kKeptFolders of the
///   user stay; older ones that no run uses any more are removed by the next run.
class LogFolder {
 public:
  /// ConfigError when it cannot be made, or another run is using it.
  LogFolder(const std::filesystem::path& asked, const std::string& run_id);
  ~LogFolder();
  LogFolder(const LogFolder&) = delete;
  LogFolder& operator=(const LogFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  /// Whether a temporary folder outlives this object.
  void keep(bool kept) { kept_ = kept; }

  static constexpr size_t kKeptFolders = 10;

 private:
  std::filesystem::path path_;
  bool temporary_;
  bool kept_ = false;
  int lock_ = -1;  ///< the folder itself, locked as long as the run uses it
};

bool holds_flight_logs(const std::filesystem::path& folder);

}  // namespace weft::launch
