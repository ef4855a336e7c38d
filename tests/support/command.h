// Runs a shell command for tests of the `weft` program.
#pragma once

#include <sys/wait.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

#include "tests/support/temp_dir.h"

namespace weft::testing {

struct CommandResult {
  int exit_code = 0;  ///< 128 + signal when killed
  std::string out, err;
};

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

/// `line` is given to the shell.
inline CommandResult run_command(const std::string& line) {
  const TempDir dir;
  const int status = std::system(("( " + line + " ) >" + dir / "out" + " 2>" + dir / "err").c_str());
  return {.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
          .out = read_file(dir / "out"),
          .err = read_file(dir / "err")};
}

/// `weft` with these arguments; `environment` holds shell assignments (A=1 B=2).
inline CommandResult weft_command(const std::string& arguments, const std::string& environment = "") {
  return run_command(environment + " " WEFT_BINARY " " + arguments);
}

/// The same with both streams in `out`, in the order in which they were written.
inline CommandResult weft_output(const std::string& arguments, const std::string& environment = "") {
  return weft_command(arguments + " 2>&1", environment);
}

}  // namespace weft::testing
