#include "weft/core/error.h"
#include "weft/core/pattern.h"
#include "weft/optim/optim.h"

namespace weft::optim {

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
