#include "weft/train/layout_text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <utility>

#include "weft/config/parse.h"
#include "weft/core/error.h"

namespace weft::train {
namespace {

const std::map<std::string, std::string>& short_names() {
  static const std::map<std::string, std::string> names{
      {"dp", "layout.dp"}, {"tp", "layout.tp"}, {"pp", "layout.pp"}, {"schedule", "parallel.schedule"}, {"chunks", "parallel.chunks"}, {"zero", "parallel.zero"}, {"dp_shard", "parallel.dp_shard"},
      {"sequence_parallel", "parallel.sequence_parallel"}, {"reshard_after_forward", "parallel.reshard_after_forward"},
      {"reshard_group", "parallel.reshard_group"}, {"tp_overlap", "parallel.tp_overlap"}, {"prefetch", "parallel.prefetch"}, {"micro_batch", "train.micro_batch"}};
  return names;
}

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\n"), last = text.find_last_not_of(" \t\n");
  return first == std::string::npos ? std::string() : text.substr(first, last - first + 1);
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(at, begin), text.size());
    if (std::string part = trimmed(text.substr(begin, end - begin)); !part.empty()) parts.push_back(std::move(part));
    begin = end + 1;
  }
  return parts;
}

}  // namespace

config::RunConfig with_layout(config::RunConfig base, const std::string& layout, bool any_key) {
  Findings findings;
  base.layout.dp = 0;
  base.layout.tp = base.layout.pp = 1;
  base.parallel = {};
  for (const std::string& setting : split(layout, ',')) {
    const size_t equals = setting.find('=');
    const std::string name = trimmed(setting.substr(0, equals));
    const auto known = short_names().find(name);
    if (known == short_names().end() && (!any_key || name.find('.') == std::string::npos)) {
      std::vector<std::string> names;
      for (const auto& item : short_names()) names.push_back(item.first);
      findings.add(name, fmt::format("in layout '{}' is no setting of a layout", layout),
                   fmt::format("{}{}", fmt::join(names, ", "), any_key ? ", or a key of the configuration" : ""));
      continue;
    }
    const std::string value = equals == std::string::npos ? "" : trimmed(setting.substr(equals + 1));
    config::override_key(base, (known == short_names().end() ? name : known->second) + "=" + value, findings);
  }
  findings.throw_if_any("layout '" + layout + "'");
  if (base.layout.dp == 0) base.layout.dp = std::max<int64_t>(1, base.parallel.dp_shard);
  return base;
}

std::vector<std::string> split_layouts(const std::string& text, bool any_key) {
  std::vector<std::string> layouts = split(text, ';');
  if (layouts.empty()) throw ConfigError("no layout is named; for instance \"dp=2; tp=2; dp_shard=2,zero=3,tp=2\"");
  for (const std::string& layout : layouts) with_layout({}, layout, any_key);
  return layouts;
}

int64_t ranks_of(const config::RunConfig& config) { return config.layout.dp * config.layout.tp * config.layout.pp; }

void set_sharding(const config::ParallelConfig& parallel, DataParallelOptions& options) {
  options.sharding = sharding_of_zero(parallel.zero);
  options.dp_shard = parallel.dp_shard;
  options.reshard_after_forward = parallel.reshard_after_forward;
  if (parallel.reshard_group > 0) options.reshard_after_forward = parallel.reshard_group;
  options.prefetch = parallel.prefetch;
}

}  // namespace weft::train
