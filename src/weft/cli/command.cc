#include "weft/cli/command.h"

#include <cstdio>
#include <exception>

#include "weft/core/error.h"

namespace weft::cli {

int run(int argc, char** argv) {
  CLI::App app{"Weft: distributed training for C++, and a planner that tells before a run whether it fits"};
  app.set_version_flag("--version", "weft " WEFT_VERSION);
  app.require_subcommand(1);
  add_planner_commands(app);
#ifdef WEFT_WITH_TORCH
  add_runtime_commands(app);
#endif
  try {
    app.parse(argc, argv);
    return static_cast<int>(ExitCode::ok);
  } catch (const CLI::RuntimeError& error) {
    return error.get_exit_code();
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? static_cast<int>(ExitCode::ok) : static_cast<int>(ExitCode::config);
  } catch (const Error& error) {
    std::fprintf(stderr, "weft: %s\n", error.what());
    return static_cast<int>(error.exit_code());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "weft: internal error: %s\n", error.what());
    return static_cast<int>(ExitCode::internal);
  }
}

}  // namespace weft::cli
