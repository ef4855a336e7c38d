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

/// `weft` with these arguments.
inline CommandResult weft_command(const std::string& arguments) {
  return run_command(std::string(WEFT_BINARY) + " " + arguments);
}

}  // namespace weft::testing
