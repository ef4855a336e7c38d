// Reads Hugging Face config.json files (transformers 4 and 5 spellings).
#pragma once

#include <filesystem>
#include <string>

#include "weft/core/json.h"
#include "weft/model/spec.h"

namespace weft::model {

/// The model of a config.json. Throws ConfigError with every finding: a missing key, a value that is not supported, a key
/// that is not known and may therefore change the mathematics. `source` names the file in messages.
ModelSpec spec_from_hf(const Json& config, const std::string& source);

ModelSpec read_hf_config(const std::filesystem::path& path);

}  // namespace weft::model
