// Which parameters are gathered and reduced together under each position of the dial.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "weft/parallel/engine.h"
#include "weft/parallel/flat_group.h"

namespace weft::parallel {

struct PlannedGroup {
  FlatGroup::Plan plan;
  std::vector<NamedTensor> parameters;
  int64_t unit = -1;  ///< index in ShardingPlan::units, or -1
};

struct ShardingPlan {
  std::vector<NamedTensor> all;         ///< every parameter once, in table order
  std::vector<NamedTensor> untouched;   ///< frozen and whole: neither gathered nor reduced
  std::vector<PlannedGroup> groups;     ///< in the order in which backward completes them
  std::vector<std::string> units;       ///< Units with parameters of their own, in registration order
  std::vector<nn::UnitBase*> unit_modules;
};

/// Depends on names, shapes, dtypes and options alone, hence equal on all ranks. A parameter belongs to the innermost Unit
/// that contains every place where it is registered; if there is none, it is kept whole.
ShardingPlan plan_sharding(std::vector<NamedTensor> parameters, const std::vector<UnitSpec>& units, const DataParallelOptions& options);

/// Plan::near of all groups that have one.
std::set<int64_t> near_groups(const ShardingPlan& plan);

}  // namespace weft::parallel
