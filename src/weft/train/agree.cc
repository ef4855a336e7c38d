#include "weft/train/agree.h"

#include <fmt/format.h>

#include "weft/core/cause.h"
#include "weft/core/error.h"

namespace weft::train {

void check_equal(const Comm& comm, const std::string& what, const std::string& text) {
  const std::vector<std::string> all = comm.all_gather_text(text);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] != all[0]) {
      throw ConfigError(
          fmt::format("{} of rank {} differs from rank 0's (start all ranks with the same arguments and files)", what,
                      comm.world_rank(static_cast<int>(rank))));
    }
  }
}

void on_rank_zero(const Comm& comm, const std::function<void()>& fn) {
  std::string failure;
  if (comm.rank() == 0) {
    try {
      fn();
    } catch (const std::exception& error) {
      failure = cause_text(error.what());
    }
  }
  const std::string first = comm.all_gather_text(failure).front();
  if (!first.empty()) throw ConfigError(first);
}

}  // namespace weft::train
