// What is equal on all ranks without having gradients: buffers, frozen parameters, start values.
#pragma once

#include <vector>

#include "weft/parallel/data_parallel.h"

namespace weft::parallel {

/// Rank 0's values on every rank. Collective.
void broadcast_tensor(const at::Tensor& tensor, const Comm& comm);

/// Applies the policy to the module's buffers at the end of a round. Collective.
void synchronise_buffers(const std::vector<NamedTensor>& buffers, BufferPolicy policy, const Comm& comm);

}  // namespace weft::parallel
