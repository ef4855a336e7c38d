// Colours of actions, the same in the terminal and in pictures.
#pragma once

#include "weft/schedule/action.h"

namespace weft::schedule {

struct Colour {
  int ansi;         ///< of the 256-colour table
  const char* hex;  ///< the same for SVG
};

/// Blue forward, green backward, teal input gradient, amber weight gradient. Even and odd chunks differ in tone, even
/// and odd micro-batches a little in lightness, so that neighbours stay apart without borders.
Colour colour_of(const Schedule& schedule, const Action& action);
/// Of an idle rank.
inline constexpr Colour kIdle = {236, "#e8e8ec"};

}  // namespace weft::schedule
