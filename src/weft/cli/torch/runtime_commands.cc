#include "weft/cli/command.h"

namespace weft::cli {

void add_runtime_commands(CLI::App&) {}

}  // namespace weft::cli
