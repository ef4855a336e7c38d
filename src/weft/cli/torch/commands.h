// Commands of the torch half: one file each.
#pragma once

#include <CLI/CLI.hpp>

namespace weft::cli {

void add_train(CLI::App& app);
void add_data(CLI::App& app);
void add_generate(CLI::App& app);
void add_rehearse(CLI::App& app);
void add_verify(CLI::App& app);
void add_doctor(CLI::App& app);
void add_bench(CLI::App& app);

}  // namespace weft::cli
