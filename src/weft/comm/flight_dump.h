// Flight logs on demand: who waits for whom, while a job hangs. `weft doctor FOLDER` reads what is written here.
#pragma once

#include <csignal>
#include <string>

namespace weft {

/// Writes the flight log of every rank in this process to `folder`/flight-rank<N>.json. Any thread. ConfigError when a file
/// cannot be written.
void dump_flight_logs(const std::string& folder);

/// From now on `signal` writes them, also while the ranks wait: the handler wakes a thread of its own that does the work.
/// `folder` empty: the one named by WEFT_FLIGHT_DIR, else the current one. The library never calls this; the `weft` command
/// does. A handler that was there is replaced. Once per process: a second call changes the folder.
void install_flight_signal(int signal = SIGUSR1, const std::string& folder = "");

}  // namespace weft
