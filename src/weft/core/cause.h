// The cause in the text of somebody else's exception.
#pragma once

#include <string>
#include <string_view>

namespace weft {

/// What an exception of libtorch or gloo says, without where in their sources it was thrown: "Exception raised from ..." and the
/// stack behind it, and a leading "[file:line] ". Other texts stay as they are.
std::string cause_text(std::string_view what);
/// The first line of it.
std::string cause_line(std::string_view what);

}  // namespace weft
