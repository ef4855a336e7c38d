// A plan for other programs: TOML of Weft, flags of Megatron-LM and torchtitan.
#pragma once

#include <string>

#include "weft/plan/search.h"

namespace weft::plan {

/// The layout and batch of a plan as TOML, with the prediction as comments.
std::string plan_toml(const SearchRequest& request, const Candidate& candidate);

/// Command-line flags for "megatron" (Megatron-LM) or "torchtitan". Throws ConfigError for another target, and for a
/// layout that the target has no flag for.
std::string export_flags(const std::string& target, const SearchRequest& request, const Candidate& candidate);

}  // namespace weft::plan
