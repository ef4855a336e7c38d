// Starts one rank as a child process of the launcher.
#pragma once

#include <sys/types.h>
#include <string>
#include <vector>

#include "weft/launch/environment.h"

namespace weft::launch {

struct SpawnOptions {
  std::vector<std::string> command;  ///< program, looked up in PATH, and its arguments
  Environment environment;           ///< all variables of the child
  int stdin_fd = -1;                 ///< -1: /dev/null
  int stdout_fd = -1;                ///< -1: the launcher's own
  int stderr_fd = -1;
  int inherited_fd = -1;  ///< one more descriptor that stays open under its number; -1: none
  bool own_group = true;  ///< a process group of its own, so that a signal to it reaches grandchildren
};

/// Starts the program. It is killed when the launcher dies, however that happens. ConfigError when it cannot be
/// started. Uses vfork as posix_spawn does: no copy of the address space and no fork handlers, so it is safe once
/// libtorch is loaded; posix_spawn itself cannot tie the child's life to the launcher's.
pid_t spawn(const SpawnOptions& options);

}  // namespace weft::launch
