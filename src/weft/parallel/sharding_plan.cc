#include "weft/parallel/sharding_plan.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <unordered_map>

#include "weft/layout/place.h"
#include "weft/parallel/flat_view.h"
#include "weft/parallel/option_check.h"

namespace weft::parallel {
namespace {

using Chain = std::vector<size_t>;  // Units around a parameter, outermost first

Chain units_around(const std::string& parameter, const std::vector<UnitSpec>& units) {
  Chain chain;
  for (size_t u = 0; u < units.size(); ++u) {
    const bool inside = units[u].name.empty() || parameter.compare(0, units[u].name.size() + 1, units[u].name + ".") == 0;
    if (!inside) continue;
    // A module that is registered under two names is one Unit.
    size_t first = 0;
    while (units[first].unit != units[u].unit) ++first;
    chain.push_back(first);
  }
  std::sort(chain.begin(), chain.end(), [&](size_t a, size_t b) { return units[a].name.size() < units[b].name.size(); });
  return chain;
}

void keep_common(Chain& chain, const Chain& other) {
  const auto differ = std::mismatch(chain.begin(), chain.end(), other.begin(), other.end());
  chain.erase(differ.first, chain.end());
}

at::ScalarType gradient_dtype(const at::Tensor& parameter, const DataParallelOptions& options) {
  return options.gradient_dtype.value_or(c10::toRealValueType(parameter.scalar_type()));
}

/// What must be equal for parameters to share a buffer.
std::string key_of(const at::Tensor& p, const DataParallelOptions& options) {
  return p.toString() + c10::toString(gradient_dtype(p, options)) + (p.requires_grad() ? "" : " frozen");
}

/// A parameter that is not sharded, and the settings of the Unit around it.
struct WholeMember {
  NamedTensor parameter;
  UnitSettings settings;
};

std::string key_of(const WholeMember& member, const DataParallelOptions& options) {
  const auto& [p, settings] = member;
  const auto reduce = settings.reduce_dtype.value_or(at::ScalarType::Undefined);
  return key_of(p.tensor, options) + c10::toString(reduce) + std::to_string(static_cast<int>(settings.sharding));
}

void add_unit_groups(ShardingPlan& plan, int64_t unit, const std::vector<NamedTensor>& members, const DataParallelOptions& options) {
  const UnitSettings settings = settings_of(plan.units[static_cast<size_t>(unit)], options);
  std::map<std::string, PlannedGroup> by_key;
  for (const NamedTensor& p : members) {
    PlannedGroup& group = by_key[key_of(p.tensor, options)];
    group.unit = unit;
    group.plan = {.label = "unit '" + plan.units[static_cast<size_t>(unit)] + "'",
                  .gradient_dtype = gradient_dtype(p.tensor, options),
                  .trainable = p.tensor.requires_grad(),
                  .residence = Residence::released,
                  .on_host = options.offload_parameters,
                  .near = settings.reshard.group().value_or(0),
                  .reduce_dtype = settings.reduce_dtype};
    group.parameters.push_back(p);
  }
  for (auto& [key, group] : by_key) plan.groups.push_back(std::move(group));
}

void add_whole_groups(ShardingPlan& plan, const std::vector<WholeMember>& members, const DataParallelOptions& options) {
  std::vector<layout::BucketItem> items;
  for (const WholeMember& member : members) {
    const at::Tensor& p = member.parameter.tensor;
    items.push_back({.bytes = real_numel(p) * static_cast<int64_t>(c10::elementSize(gradient_dtype(p, options))),
                     .key = key_of(member, options)});
  }
  for (const auto& bucket : layout::make_buckets(items, options.bucket)) {
    PlannedGroup group;
    for (auto it = bucket.rbegin(); it != bucket.rend(); ++it) group.parameters.push_back(members[static_cast<size_t>(*it)].parameter);
    const UnitSettings& settings = members[static_cast<size_t>(bucket.front())].settings;
    group.plan = {.label = "the module",
                  .gradient_dtype = gradient_dtype(group.parameters.front().tensor, options),
                  .keep_full_gradients = settings.sharding == Sharding::optimizer,
                  .reduce_dtype = settings.reduce_dtype};
    plan.groups.push_back(std::move(group));
  }
}

}  // namespace

ShardingPlan plan_sharding(std::vector<NamedTensor> parameters, const std::vector<UnitSpec>& units, const DataParallelOptions& options) {
  ShardingPlan plan;
  std::unordered_map<const void*, Chain> around;
  for (NamedTensor& p : parameters) {
    const Chain chain = units_around(p.name, units);
    const auto [found, fresh] = around.emplace(p.tensor.unsafeGetTensorImpl(), chain);
    fresh ? plan.all.push_back(std::move(p)) : keep_common(found->second, chain);
  }
  std::map<size_t, std::vector<NamedTensor>> in_unit;
  std::vector<WholeMember> whole;
  const UnitSettings outside{.sharding = options.sharding, .reshard = options.reshard_after_forward, .reduce_dtype = options.reduce_dtype};
  for (const NamedTensor& p : plan.all) {
    const Chain& chain = around.at(p.tensor.unsafeGetTensorImpl());
    const UnitSettings settings = chain.empty() ? outside : settings_of(units[chain.back()].name, options);
    if (settings.sharding == Sharding::parameters && !chain.empty()) {
      in_unit[chain.back()].push_back(p);
    } else if (p.tensor.requires_grad()) {
      whole.push_back({p, settings});
    } else {
      plan.untouched.push_back(p);
    }
  }
  for (const auto& [unit, members] : in_unit) {
    plan.units.push_back(units[unit].name);
    plan.unit_modules.push_back(units[unit].unit);
  }
  auto index = static_cast<int64_t>(in_unit.size());
  for (auto it = in_unit.rbegin(); it != in_unit.rend(); ++it) add_unit_groups(plan, --index, it->second, options);
  // What lies outside of Units is complete when the first layers are, so it comes last.
  add_whole_groups(plan, whole, options);
  for (PlannedGroup& group : plan.groups) {
    for (const NamedTensor& p : group.parameters) group.plan.granule = std::lcm(group.plan.granule, granule_of(p.name, options));
  }
  return plan;
}

std::set<int64_t> near_groups(const ShardingPlan& plan) {
  std::set<int64_t> sizes;
  for (const PlannedGroup& group : plan.groups) {
    if (group.plan.near > 0) sizes.insert(group.plan.near);
  }
  return sizes;
}

}  // namespace weft::parallel
