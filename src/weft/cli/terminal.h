// What drawings need to know about the terminal behind stdout.
#pragma once

#include <string>

namespace weft::cli {

/// `wish` is auto, always or never. auto: stdout is a terminal that shows colours and NO_COLOR is not set. Throws
/// ConfigError on other words.
bool use_colour(const std::string& wish);

/// `wish` columns, or those of the terminal when it is 0. Throws ConfigError when negative.
int resolved_width(int wish);

}  // namespace weft::cli
