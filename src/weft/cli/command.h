// Registry of the commands of `weft`. Each command is one file that defines one function add_<name>(CLI::App&).
#pragma once

#include <CLI/CLI.hpp>

#include <exception>
#include <functional>
#include <string>

namespace weft::cli {

/// Adds a subcommand to `app`; its callback throws weft::Error on failure and returns normally on success. A command
/// that ends with another exit code (for instance `verify` with 1) throws CLI::RuntimeError(code).
using AddCommand = std::function<void(CLI::App&)>;

/// Commands of the torch-free half, in the order of `weft --help`.
void add_planner_commands(CLI::App& app);
/// Commands that need libtorch; absent in a build with WEFT_WITH_TORCH=OFF.
void add_runtime_commands(CLI::App& app);
/// Whether `error` says in libtorch's or a kernel's words that there was no memory. Of the same half.
bool is_lack_of_memory(const std::exception& error);

/// "weft 0.1.0 (libtorch 2.15.0; g++ 12.2.0)".
std::string version_text();

/// Parses and runs; maps errors to exit codes (0, 2, 3, 70). Results go to stdout, everything else to stderr.
int run(int argc, char** argv);

}  // namespace weft::cli
