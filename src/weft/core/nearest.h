// "Did you mean": known names close to a mistyped one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace weft {

/// Insertions, deletions, substitutions and swaps of neighbours that turn a into b (optimal string alignment).
size_t edit_distance(std::string_view a, std::string_view b);

/// The `count` names of `known` closest to `name`, closest first; ties in the order given.
std::vector<std::string> nearest(std::string_view name, std::vector<std::string> known, size_t count = 1);

/// "did you mean 'x'?" when a name differs in at most a third of its letters (at least one); else the list of names
/// when they are few; else "".
std::string did_you_mean(std::string_view name, const std::vector<std::string>& known);

}  // namespace weft
