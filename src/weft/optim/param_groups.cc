#include "weft/core/error.h"
#include "weft/optim/optim.h"

namespace weft::optim {
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

std::vector<at::Tensor> matching(const DataParallel& dp, const std::vector<std::string>& rules, size_t rule) {
  std::vector<at::Tensor> members;
  for (const NamedTensor& shard : dp.shards()) {
    size_t first = 0;
    while (first < rules.size() && !matches(rules[first], shard.name)) ++first;
    if (first == rules.size()) {
      throw ConfigError("parameter '" + shard.name + "' matches none of the rules for parameter groups. End them with \"*\"");
    }
    if (first == rule) members.push_back(shard.tensor);
  }
  return members;
}

}  // namespace weft::optim
