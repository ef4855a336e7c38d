#include "weft/comm/crossing.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>

namespace weft::detail {

std::vector<std::string> places_of_ranks(const Comm& world) {
  const auto& core = world.state()->core;
  if (!world.state()->backend || core->local_size == core->size) return {};
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  return world.all_gather_text(core->node < 0 ? host.data() : fmt::format("{} (node {})", host.data(), core->node));
}

std::optional<std::string> crossing_text(const std::string& mesh, const std::string& axis,
                                         const std::vector<std::vector<int>>& groups, const std::vector<std::string>& places) {
  size_t crossing = 0;
  std::string example;
  for (const std::vector<int>& ranks : groups) {
    std::vector<std::string> distinct;
    for (const int r : ranks) {
      const std::string& place = places[static_cast<size_t>(r)];
      if (std::find(distinct.begin(), distinct.end(), place) == distinct.end()) distinct.push_back(place);
    }
    if (distinct.size() < 2) continue;
    if (crossing++ == 0) example = fmt::format("ranks {} on {}", fmt::join(ranks, ", "), fmt::join(distinct, ", "));
  }
  if (crossing == 0) return std::nullopt;
  return fmt::format("mesh {}: {} of {} groups along {} cross nodes, for instance {}; every layer communicates within such a group, "
                     "over the network here (make {} the innermost axis, with a size that divides the ranks of a node, and start the "
                     "ranks node by node)", mesh, crossing, groups.size(), axis, example, axis);
}

}  // namespace weft::detail
