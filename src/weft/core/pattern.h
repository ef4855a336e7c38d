// Patterns for dotted names.
#pragma once

#include <string_view>

namespace weft {

/// Whether `name` fits one of the patterns, which "|" separates; "*" stands for any characters, none included: "*.bias|norm.*".
bool matches(std::string_view patterns, std::string_view name);

}  // namespace weft
