#include "weft/schedule/action.h"

#include <array>

namespace weft::schedule {

std::string_view kind_name(Kind kind) {
  static constexpr std::array<std::string_view, kKinds> names = {
      "F", "I", "W", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE"};
  return names[static_cast<size_t>(kind)];
}

bool Schedule::one_stage_per_rank() const {
  if (owner.size() != ranks.size()) return false;
  for (size_t stage = 0; stage < owner.size(); ++stage) {
    if (owner[stage] != static_cast<int>(stage)) return false;
  }
  return true;
}

}  // namespace weft::schedule
