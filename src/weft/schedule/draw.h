// Pictures of a schedule: a grid for the terminal and an SVG file.
#pragma once

#include <string>

#include "weft/schedule/action.h"
#include "weft/schedule/timeline.h"

namespace weft::schedule {

struct DrawOptions {
  int width = 80;       ///< columns; what does not fit continues in another band of rows
  bool colour = false;  ///< ANSI 256 colours and half blocks; otherwise ASCII only
};

/// A row per rank, time to the right. In colour: a block per action, the micro-batch inside where it fits, as large as
/// the width allows. Plain: every action by name ("F3", "B3--"), idle time as dots.
std::string draw(const Schedule& schedule, const Timeline& timeline, const DrawOptions& options);

/// The same as a self-contained SVG picture, 1200 pixels wide, with a legend and a time axis.
std::string draw_svg(const Schedule& schedule, const Timeline& timeline);

}  // namespace weft::schedule
