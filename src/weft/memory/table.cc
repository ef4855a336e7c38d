#include "weft/memory/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "weft/core/units.h"

namespace weft::memory {

std::string table(const std::string& title, const std::vector<TableRow>& rows) {
  size_t first = title.size();
  for (const TableRow& row : rows) first = std::max(first, row.name.size());
  constexpr size_t kWidth = 14;  // holds "communication" and "1023 MiB"
  std::string text = fmt::format("{:<{}}", title, first);
  for (size_t i = 0; i < kCategories; ++i) text += fmt::format("{:>{}}", name_of(static_cast<Category>(i)), kWidth);
  text += fmt::format("{:>{}}\n", "total", kWidth);
  for (const TableRow& row : rows) {
    text += fmt::format("{:<{}}", row.name, first);
    for (const int64_t bytes : row.amounts) text += fmt::format("{:>{}}", bytes_text(static_cast<double>(bytes)), kWidth);
    const auto total = std::accumulate(row.amounts.begin(), row.amounts.end(), int64_t{0});
    text += fmt::format("{:>{}}\n", bytes_text(static_cast<double>(total)), kWidth);
  }
  return text;
}

}  // namespace weft::memory
