// Memory accounts as people read them.
#pragma once

#include <string>
#include <vector>

#include "weft/memory/account.h"

namespace weft::memory {

struct TableRow {
  std::string name;  ///< for instance "rank 0"
  Amounts amounts;   ///< bytes by category
};

/// One line per row, a column per category and the total; `title` heads the first column. Ends with a newline.
std::string table(const std::string& title, const std::vector<TableRow>& rows);

}  // namespace weft::memory
