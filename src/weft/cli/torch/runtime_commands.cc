#include "weft/cli/command.h"
#include "weft/cli/torch/commands.h"

namespace weft::cli {

void add_runtime_commands(CLI::App& app) {
  add_data(app);
  add_doctor(app);
}

}  // namespace weft::cli
