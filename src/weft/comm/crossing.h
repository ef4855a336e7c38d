// Which groups of a mesh cross from one node to another.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/comm/state.h"

namespace weft::detail {

/// Where each world rank runs: its host's name, and the node's index when the launcher gives one. Collective over `world`, the
/// group of all ranks, unless they are known to share a node, and in a
/// rehearsal: then empty.
std::vector<std::string> places_of_ranks(const Comm& world);

/// What to tell the user when a group along `axis` has members on several of `places` (by world rank); nothing when none has.
std::optional<std::string> crossing_text(const std::string& mesh, const std::string& axis,
                                         const std::vector<std::vector<int>>& groups, const std::vector<std::string>& places);

}  // namespace weft::detail
