#include "weft/schedule/palette.h"

namespace weft::schedule {

Colour colour_of(const Schedule& schedule, const Action& action) {
  static constexpr Colour table[4][2][2] = {
      {{{33, "#0087ff"}, {39, "#00afff"}}, {{69, "#5f87ff"}, {75, "#5fafff"}}},      // F
      {{{37, "#00afaf"}, {44, "#00d7d7"}}, {{73, "#5fafaf"}, {80, "#5fd7d7"}}},      // I
      {{{178, "#d7af00"}, {220, "#ffd700"}}, {{179, "#d7af5f"}, {222, "#ffd787"}}},  // W
      {{{35, "#00af5f"}, {41, "#00d75f"}}, {{71, "#5faf5f"}, {77, "#5fd75f"}}},      // B
  };
  const int chunk = action.stage / schedule.rank_count();
  return table[static_cast<size_t>(action.kind)][chunk % 2][action.micro_batch % 2];
}

}  // namespace weft::schedule
