// "Did you mean": known names close to a mistyped one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace weft {

/// Levenshtein distance: insertions, deletions and substitutions that turn a into b.
size_t edit_distance(std::string_view a, std::string_view b);

/// The `count` names of `known` closest to `name`, closest first; ties in the order given.
std::vector<std::string> nearest(std::string_view name, std::vector<std::string> known, size_t count = 1);

}  // namespace weft
