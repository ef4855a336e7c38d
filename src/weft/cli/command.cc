#include "weft/cli/command.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>

#include "weft/core/cause.h"
#include "weft/core/error.h"
#include "weft/core/nearest.h"

namespace weft::cli {
namespace {

/// A word where a command must stand and none of that name exists; CLI11 would only say that it was not expected.
void check_command_names(const CLI::App& root, int argc, char** argv) {
  const CLI::App* app = &root;
  std::string path = "weft";
  for (int i = 1; i < argc && app->get_require_subcommand_min() > 0; ++i) {
    const std::string word = argv[i];
    if (word.empty() || word[0] == '-') return;
    std::vector<std::string> names;
    const CLI::App* next = nullptr;
    for (const CLI::App* command : app->get_subcommands([](const CLI::App*) { return true; })) {
      names.push_back(command->get_name());
      if (command->get_name() == word) next = command;
    }
    if (!next) {
      throw ConfigError(fmt::format("'{}' is no command of {}; {}", word, path, did_you_mean(word, names)));
    }
    app = next;
    path += " " + word;
  }
}

bool lacked_memory(const std::exception& error) {
#ifdef WEFT_WITH_TORCH
  return is_lack_of_memory(error);
#else
  return dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
#endif
}

/// Results that a full disk swallowed must not look like success.
void check_results_arrived() {
  if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return;
  throw ConfigError(fmt::format("the output could not be written: {}", std::strerror(errno)));
}

}  // namespace

std::string version_text() {
#ifdef WEFT_WITH_TORCH
  const char* const torch = "libtorch " WEFT_TORCH_VERSION;
#else
  const char* const torch = "planner only, without libtorch";
#endif
#ifdef __clang__
  const char* const compiler = "clang ";
#else
  const char* const compiler = "g++ ";
#endif
  return fmt::format("weft {} ({}; {}{})", WEFT_VERSION, torch, compiler, __VERSION__);
}

int run(int argc, char** argv) {
  CLI::App app{"Weft: distributed training for C++, and a planner that tells before a run whether it fits", "weft"};
  app.set_version_flag("--version", version_text());
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 done, 2 you can fix it, 3 communication failed, 70 a fault of Weft.\n"
      "Results go to stdout, everything else to stderr. Each command: weft COMMAND --help\n\n"
      "Example:\n  weft run -n 2 -- weft train configs/demo.toml");
  add_planner_commands(app);
#ifdef WEFT_WITH_TORCH
  add_runtime_commands(app);
#endif
  try {
    check_command_names(app, argc, argv);
    app.parse(argc, argv);
    check_results_arrived();
    return static_cast<int>(ExitCode::ok);
  } catch (const CLI::RuntimeError& error) {
    return error.get_exit_code();
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? static_cast<int>(ExitCode::ok) : static_cast<int>(ExitCode::config);
  } catch (const Error& error) {
    std::fprintf(stderr, "weft: %s\n", error.what());
    return static_cast<int>(error.exit_code());
  } catch (const std::exception& error) {
    // The stack of libtorch would push the cause out of the last lines that `weft run` shows.
    const char* const debug = std::getenv("WEFT_DEBUG");
    const std::string text = debug && *debug && *debug != '0' ? error.what() : cause_text(error.what());
    if (lacked_memory(error)) {
      std::fprintf(stderr, "weft: out of memory: %s. Give the process more (ulimit -d, ulimit -v), or it less to do\n", text.c_str());
      return static_cast<int>(ExitCode::config);
    }
    std::fprintf(stderr, "weft: internal error: %s\n", text.c_str());
    return static_cast<int>(ExitCode::internal);
  }
}

}  // namespace weft::cli
