// Results as text for a terminal and as JSON for machines.
#pragma once

#include <string>

#include "weft/core/json.h"
#include "weft/plan/campaign.h"
#include "weft/plan/search.h"

namespace weft::plan {

/// "███████▌      ": `share` of `width` characters, in eighths.
std::string bar(double share, int width);

/// Memory by category and time by term with bars, rates with their conventions.
std::string estimate_text(const Job& job, const Estimate& estimate, const Rates& rates);
Json estimate_json(const Job& job, const Estimate& estimate, const Rates& rates);

/// Ranked layouts, the decision in words, why others lost, Pareto front, what would help.
std::string search_text(const SearchRequest& request, const SearchResult& result, const std::vector<std::string>& words, const std::vector<Sensitivity>& sensitivities, size_t top);
Json search_json(const SearchRequest& request, const SearchResult& result, const std::vector<std::string>& words, const std::vector<Sensitivity>& sensitivities, size_t top);

Json layout_json(const layout::Layout& layout);

}  // namespace weft::plan
