// Starts and supervises the ranks of a job on this machine: what `weft run` does.
#pragma once

#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

namespace weft::launch {

struct LaunchOptions {
  int ranks = 1;
  std::vector<std::string> command;  ///< program and arguments
  std::filesystem::path log_dir;     ///< empty: a temporary folder that is kept only when a rank fails (log_folder.h)
  std::vector<int> tee = {0};  ///< ranks whose output is shown live; one alone is shown as it is, several with a prefix
  int max_restarts = 0;        ///< how often all ranks are started again after a failure
  /// From SIGTERM to SIGKILL when ranks are stopped.
  std::chrono::milliseconds grace = std::chrono::seconds(5);
};

/// Starts the ranks with torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, ..., MASTER_ADDR, MASTER_PORT) and
/// waits. Returns 0, or the exit code of the first rank that failed (128 + signal).
///
/// - MASTER_PORT is a port of a socket that the launcher binds to port 0 and rank 0 inherits under
/// WEFT_MASTER_LISTEN_FD; it
///   is bound and not listening, so that programs which ignore it can bind the same port with SO_REUSEADDR.
/// - OMP_NUM_THREADS, when unset, is the number of usable cores divided by the ranks, at least 1.
/// - Ranks above 0 read from /dev/null. Each rank's output is in LOG_DIR/rank-R.log (rank-R.restart-K.log after K
/// restarts).
/// - When a rank fails the others get SIGTERM, and SIGKILL after `grace`. The failure that is reported is the first in
/// time
///   that is not a CommError (exit code 3, which mostly tells of another rank's death), its last lines and its log.
/// - WEFT_FLIGHT_DIR, when unset, is the folder of the logs: flight logs of failures are written there, and SIGUSR1 makes
/// the ranks that expect it (`weft train` does) write theirs; a temporary folder that holds any is kept.
/// - SIGINT and SIGTERM are forwarded, ranks may finish in their own time; the second one kills them.
/// - All ranks are killed when the launcher dies.
///
/// Must be called from a process with one thread that expects no SIGCHLD: it blocks signals while it runs.
int launch(const LaunchOptions& options);

}  // namespace weft::launch
