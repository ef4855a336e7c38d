#include "weft/cli/terminal.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <string_view>

#include "weft/core/error.h"
#include "weft/core/progress.h"

namespace weft::cli {

bool use_colour(const std::string& wish) {
  if (wish == "always" || wish == "never") return wish == "always";
  if (wish != "auto") throw ConfigError(fmt::format("--color {}: use auto, always or never", wish));
  const char* terminal = std::getenv("TERM");
  return ::isatty(STDOUT_FILENO) && !std::getenv("NO_COLOR") && !(terminal && std::string_view(terminal) == "dumb");
}

int resolved_width(int wish) {
  if (wish < 0) throw ConfigError(fmt::format("--width {}: a number of columns, or 0 for the terminal's", wish));
  return wish > 0 ? wish : terminal_width(stdout);
}

}  // namespace weft::cli
