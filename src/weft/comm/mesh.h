// Mesh: named axes over the ranks of a world.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "weft/comm/world.h"

namespace weft {

struct Axis {
  std::string name;   ///< pp, dp_replicate, dp_shard, cp, tp, or any name of yours; "dp" is dp_replicate x dp_shard
  int64_t size = 1;
};

/// Named axes over a world, outermost first: Mesh mesh(world, {{"pp", 2}, {"dp", 4}, {"tp", 2}}). The product of the sizes
/// must be the world's size (ConfigError with the product otherwise). Neighbouring ranks lie on the innermost axis.
/// mesh["tp"] is this rank's Comm along an axis; mesh[{"dp", "cp"}] the flattened one, its ranks in the
/// mesh's order. Size-1 axes need no group; of the axes known by name those not listed have size 1, other names are errors.
/// When a group along tp (or etp) has ranks on several nodes, rank 0 logs a warning with the hosts (weft/core/log.h).
/// Construction and first use of a flattened axis are collective, in an order that depends only on the arguments.
class Mesh {
 public:
  Mesh(const World& world, std::vector<Axis> axes);

  Comm operator[](std::string_view axis) const;
  Comm operator[](std::initializer_list<std::string_view> axes) const;

  int64_t size(std::string_view axis) const;
  int64_t coord(std::string_view axis) const;  ///< this rank's position on the axis
  const std::vector<Axis>& axes() const;
  /// "pp=2 x dp=4 x tp=2 (16 ranks)" and, per axis, the world ranks of this rank's group; the ranks of each host, where a tp axis
  /// made that worth knowing and there are several.
  std::string describe() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace weft
