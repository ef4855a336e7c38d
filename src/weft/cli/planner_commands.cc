#include "weft/cli/planner_commands.h"

namespace weft::cli {

void add_planner_commands(CLI::App& app) {
  add_run(app);
  add_plan(app);
  add_estimate(app);
  add_simulate(app);
  add_schedule(app);
}

}  // namespace weft::cli
