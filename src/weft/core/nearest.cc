#include "weft/core/nearest.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

namespace weft {

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  std::iota(last.begin(), last.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    std::swap(before, last);
    std::swap(last, row);
  }
  return last[b.size()];
}

std::vector<std::string> nearest(std::string_view name, std::vector<std::string> known, size_t count) {
  std::stable_sort(known.begin(), known.end(), [&](const std::string& a, const std::string& b) {
    return edit_distance(a, name) < edit_distance(b, name);
  });
  known.resize(std::min(count, known.size()));
  return known;
}

std::string did_you_mean(std::string_view name, const std::vector<std::string>& known) {
  if (known.empty()) return "";
  const std::string best = nearest(name, known).front();
  if (edit_distance(name, best) <= std::max<size_t>(1, name.size() / 3)) return fmt::format("did you mean '{}'?", best);
  constexpr size_t kFew = 20;  // a longer list helps nobody in an error text
  return known.size() > kFew ? "" : fmt::format("known: {}", fmt::join(known, ", "));
}

}  // namespace weft
