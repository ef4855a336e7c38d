// Named models: published sizes as data, and tiny ones for tests.
#pragma once

#include <string>
#include <vector>

#include "weft/model/spec.h"

namespace weft::model {

/// The model called `name` (see preset_names). Throws ConfigError with the nearest names if there is none.
ModelSpec preset(const std::string& name);

/// Names of all presets, family by family.
std::vector<std::string> preset_names();

}  // namespace weft::model
