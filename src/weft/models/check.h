// What the runtime can build.
#pragma once

#include "weft/models/block.h"

namespace weft::models {

/// Throws ConfigError with every reason why `spec` cannot be built with `options`.
void check_buildable(const model::ModelSpec& spec, const TransformerOptions& options);

}  // namespace weft::models
