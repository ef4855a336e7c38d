#include "weft/cli/command.h"
#include "weft/cli/torch/commands.h"
#include "weft/memory/cpu_allocator.h"

namespace weft::cli {

void add_runtime_commands(CLI::App& app) {
  add_train(app);
  add_data(app);
  add_generate(app);
  add_rehearse(app);
  add_verify(app);
  add_doctor(app);
  add_bench(app);
}

bool is_lack_of_memory(const std::exception& error) { return memory::is_lack_of_memory(error); }

}  // namespace weft::cli
