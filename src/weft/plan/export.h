// A plan for other programs: TOML of Weft, flags of Megatron-LM and torchtitan.
#pragma once

#include <functional>
#include <string>

#include "weft/plan/search.h"

namespace weft::plan {

/// A plan as TOML in the keys of the training configuration, with the prediction as comments. Keys for which `known` is
/// false (degrees that the runtime does not have) are written as comments, so that the file always reads back.
std::string plan_toml(const SearchRequest& request, const Candidate& candidate, const std::function<bool(const std::string&)>& known);

/// Command-line flags for "megatron" (Megatron-LM) or "torchtitan". Throws ConfigError for another target, and for a
/// layout that the target has no flag for.
std::string export_flags(const std::string& target, const SearchRequest& request, const Candidate& candidate);

}  // namespace weft::plan
