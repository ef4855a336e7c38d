// Sharding::none: every rank keeps everything, gradients are all-reduced bucket by bucket (DDP).
#pragma once

#include <memory>

#include "weft/parallel/engine.h"

namespace weft::parallel {

std::shared_ptr<Engine> make_replicated_engine(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers, Comm comm,
                                               DataParallelOptions options);

}  // namespace weft::parallel
