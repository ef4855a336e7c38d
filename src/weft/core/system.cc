#include "weft/core/system.h"

#include <sched.h>

#include <fstream>

namespace weft {

int64_t usable_cores() {
  cpu_set_t usable;
  CPU_ZERO(&usable);
  return ::sched_getaffinity(0, sizeof usable, &usable) == 0 ? CPU_COUNT(&usable) : 1;
}

std::string value_behind(const std::filesystem::path& file, const std::string& key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with(key)) continue;
    const size_t start = line.find_first_not_of(" \t:", key.size());
    return start == std::string::npos ? "" : line.substr(start);
  }
  return "";
}

}  // namespace weft
