#include "bench/support/own_ranks.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "weft/launch/launcher.h"

namespace weft::bench {
namespace {

constexpr const char* kResultVariable = "WEFT_BENCH_RESULT";

}  // namespace

std::optional<std::string> result_file() {
  const char* file = std::getenv(kResultVariable);
  return file ? std::optional<std::string>(file) : std::nullopt;
}

std::vector<nlohmann::ordered_json> run_own_ranks(int ranks, const std::vector<std::string>& arguments) {
  std::string pattern = std::filesystem::temp_directory_path() / "weft-bench-XXXXXX";
  if (!::mkdtemp(pattern.data())) throw std::runtime_error("no temporary folder");
  const std::filesystem::path folder = pattern, file = folder / "result.jsonl";
  ::setenv(kResultVariable, file.c_str(), 1);
  launch::LaunchOptions options{.ranks = ranks, .command = {std::filesystem::read_symlink("/proc/self/exe")}, .tee = {}};
  options.command.insert(options.command.end(), arguments.begin(), arguments.end());
  const int code = launch::launch(options);
  std::vector<nlohmann::ordered_json> lines;
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) lines.push_back(nlohmann::ordered_json::parse(line));
  std::filesystem::remove_all(folder);
  if (code != 0) throw std::runtime_error(fmt::format("a rank ended with exit code {}", code));
  return lines;
}

}  // namespace weft::bench
