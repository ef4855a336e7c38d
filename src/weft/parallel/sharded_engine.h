// Sharding::optimizer, gradients and parameters: each rank updates its shard (ZeRO-1, ZeRO-2, ZeRO-3).
#pragma once

#include <memory>

#include "weft/parallel/engine.h"

namespace weft::parallel {

/// units: of the module that the parameters belong to; used for Sharding::parameters only. Collective.
std::shared_ptr<Engine> make_sharded_engine(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers,
                                            const std::vector<UnitSpec>& units, Comm comm, DataParallelOptions options);

}  // namespace weft::parallel
