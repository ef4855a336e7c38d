#include "weft/parallel/option_check.h"

#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "weft/core/pattern.h"
#include "weft/core/units.h"
#include "weft/parallel/reduce_hook.h"

namespace weft::parallel {
namespace {

std::string text_of(std::optional<at::ScalarType> dtype) { return dtype ? c10::toString(*dtype) : "as it is"; }

std::string text_of(const Reshard& reshard) {
  return reshard.group() ? std::to_string(*reshard.group()) : reshard.after_forward() ? "true" : "false";
}

void check_reshard(const Reshard& reshard, int64_t shards, Findings& findings) {
  if (!reshard.group()) return;
  std::vector<int64_t> legal = divisors(shards);
  std::erase_if(legal, [shards](int64_t size) { return size == 1 || size == shards; });
  if (std::ranges::find(legal, *reshard.group()) != legal.end()) return;
  findings.add("reshard_after_forward",
               fmt::format("{} ranks cannot hold one copy between them where {} share the parameters out", *reshard.group(), shards),
               legal.empty() ? "use true or false" : fmt::format("legal values: {}, or true or false", fmt::join(legal, ", ")));
}

void check_wire(const std::string& where, std::optional<at::ScalarType> dtype, Findings& findings) {
  if (dtype && !can_travel_as(*dtype)) findings.add(where, c10::toString(*dtype), kWireDtypes);
}

void check_rule(const UnitOptions& rule, const DataParallelOptions& o, int64_t shards, Findings& findings) {
  const std::string where = "settings of Units '" + rule.units + "'";
  if (o.sharding == Sharding::none) findings.add(where, "under Sharding::none no Unit has settings of its own", "leave them out, or choose what to shard");
  if (rule.sharding == Sharding::none) {
    findings.add(where, "Sharding::none for some Units", "the optimizer's state of all of them is sharded: Sharding::optimizer is the least");
  }
  if (rule.reshard_after_forward && rule.sharding.value_or(o.sharding) == Sharding::parameters) check_reshard(*rule.reshard_after_forward, shards, findings);
  check_wire(where, rule.reduce_dtype, findings);
}

}  // namespace

UnitSettings settings_of(const std::string& unit, const DataParallelOptions& o) {
  UnitSettings settings{.sharding = o.sharding, .reshard = o.reshard_after_forward, .reduce_dtype = o.reduce_dtype};
  const auto rule = std::ranges::find_if(o.units, [&](const UnitOptions& r) { return matches(r.units, unit); });
  if (rule == o.units.end()) return settings;
  settings.sharding = rule->sharding.value_or(settings.sharding);
  settings.reshard = rule->reshard_after_forward.value_or(settings.reshard);
  if (rule->reduce_dtype) settings.reduce_dtype = rule->reduce_dtype;
  return settings;
}

int64_t granule_of(const std::string& parameter, const DataParallelOptions& o) {
  const auto rule = std::ranges::find_if(o.granules, [&](const Granule& g) { return matches(g.parameters, parameter); });
  return rule == o.granules.end() ? 1 : rule->elements;
}

void check_options(const DataParallelOptions& o, int64_t ranks, Findings& findings) {
  if (o.dp_shard != 0 && o.sharding == Sharding::none) {
    return findings.add("dp_shard", fmt::format("{} with Sharding::none, under which nothing is sharded", o.dp_shard),
                        "leave it out, or choose what to shard");
  }
  if (o.dp_shard < 0 || (o.dp_shard > 0 && ranks % o.dp_shard != 0)) {
    return findings.add("dp_shard", fmt::format("{} ranks do not divide into replicas of {}", ranks, o.dp_shard),
                        fmt::format("legal values: {}, or 0 for all", fmt::join(divisors(ranks), ", ")));
  }
  const int64_t shards = o.dp_shard > 0 ? o.dp_shard : ranks;
  if (o.sharding == Sharding::parameters) check_reshard(o.reshard_after_forward, shards, findings);
  const auto shards_parameters = [](const UnitOptions& rule) { return rule.sharding == Sharding::parameters; };
  if (o.offload_parameters && o.sharding != Sharding::parameters && std::ranges::none_of(o.units, shards_parameters)) {
    findings.add("offload_parameters", fmt::format("true with zero = {}, under which every rank keeps all parameters where they are used",
                                                   static_cast<int>(o.sharding)), "use Sharding::parameters (zero = 3), or leave it out");
  }
  check_wire("reduce_dtype", o.reduce_dtype, findings);
  for (const UnitOptions& rule : o.units) check_rule(rule, o, shards, findings);
  constexpr int64_t kMostGranule = 65536;
  for (const Granule& g : o.granules) {
    if (g.elements >= 1 && g.elements <= kMostGranule) continue;
    findings.add("granules of '" + g.parameters + "'", fmt::format("{} elements; at least 1, at most {}", g.elements, kMostGranule));
  }
}

std::string describe(const DataParallelOptions& o) {
  std::string units;
  for (const UnitOptions& u : o.units) {
    units += fmt::format("; units '{}': sharding {}, reshard_after_forward {}, reduce_dtype {}", u.units,
                         u.sharding ? std::to_string(static_cast<int>(*u.sharding)) : "-",
                         u.reshard_after_forward ? text_of(*u.reshard_after_forward) : "-", text_of(u.reduce_dtype));
  }
  for (const Granule& g : o.granules) units += fmt::format("; granules of '{}': {}", g.parameters, g.elements);
  const char* buffers[] = {"broadcast", "average", "local"};
  return fmt::format("options sharding {}, dp_shard {}, reshard_after_forward {}, prefetch {}, offload_parameters {}, grad_scale {}, buffers {}, gradient_dtype {}, "
                     "reduce_dtype {}, reduce_hook {}, bucket {} and {} bytes{}",
                     static_cast<int>(o.sharding), o.dp_shard, text_of(o.reshard_after_forward), o.prefetch, o.offload_parameters,
                     o.grad_scale == GradScale::sum ? "sum" : "mean_over_ranks", buffers[static_cast<int>(o.buffers)],
                     text_of(o.gradient_dtype), text_of(o.reduce_dtype), o.reduce_hook ? "yes" : "no", o.bucket.bytes, o.bucket.last_bytes,
                     units);
}

}  // namespace weft::parallel
