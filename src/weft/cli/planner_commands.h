// The commands of the torch-free half, one file each.
#pragma once

#include "weft/cli/command.h"

namespace weft::cli {

void add_run(CLI::App& app);
void add_estimate(CLI::App& app);
void add_plan(CLI::App& app);
void add_schedule(CLI::App& app);
void add_simulate(CLI::App& app);

}  // namespace weft::cli
