#include "weft/core/pattern.h"

#include <cstddef>

namespace weft {
namespace {

bool matches_one(std::string_view pattern, std::string_view name) {
  const size_t star = pattern.find('*');
  if (star == std::string_view::npos) return pattern == name;
  if (name.substr(0, star) != pattern.substr(0, star)) return false;
  for (size_t i = star; i <= name.size(); ++i) {
    if (matches_one(pattern.substr(star + 1), name.substr(i))) return true;
  }
  return false;
}

}  // namespace

bool matches(std::string_view patterns, std::string_view name) {
  while (true) {
    const size_t bar = patterns.find('|');
    if (matches_one(patterns.substr(0, bar), name)) return true;
    if (bar == std::string_view::npos) return false;
    patterns.remove_prefix(bar + 1);
  }
}

}  // namespace weft
