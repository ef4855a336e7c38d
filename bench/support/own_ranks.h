// Benchmarks whose ranks are processes: the program starts itself once per rank, and rank 0 writes lines of JSON for it.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace weft::bench {

/// The file for rank 0's lines; set: this process is a rank.
std::optional<std::string> result_file();

/// Starts `ranks` processes of this program with these arguments and returns the lines that rank 0 wrote to result_file().
/// Throws std::runtime_error with the exit code when one fails; it has said why on stderr.
std::vector<nlohmann::ordered_json> run_own_ranks(int ranks, const std::vector<std::string>& arguments);

}  // namespace weft::bench
