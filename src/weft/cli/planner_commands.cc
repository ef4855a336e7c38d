#include "weft/cli/command.h"

namespace weft::cli {

void add_planner_commands(CLI::App&) {}

}  // namespace weft::cli
