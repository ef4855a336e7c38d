// The global norm of gradients, and scaling by it.
#pragma once

#include <vector>

#include "weft/parallel/data_parallel.h"

namespace weft::parallel {

/// p-norm over the gradients of all tensors of all ranks of `splits`: ranks of one hold different elements each, and tensors whose
/// `counted` is false are counted by another rank. `norm_type` p > 0 or infinity, else ConfigError. Tensors without gradient or elements count as zero. A
/// NaN anywhere is NaN on every rank. Each tensor's norm is taken in its dtype, in fp32 if that has 16 bits; they are combined
/// in fp64. Collective over each of `splits`, whose ranks form a grid.
double gradient_norm(const std::vector<NamedTensor>& tensors, const std::vector<bool>& counted, double norm_type,
                     const std::vector<Comm>& splits);

/// Scales the gradients by max_norm / (norm + 1e-6) if that is below 1, as torch.nn.utils.clip_grad_norm_ does. ConfigError
/// when `max_norm` is negative or NaN.
void clip_gradients(const std::vector<NamedTensor>& tensors, double max_norm, double norm);

}  // namespace weft::parallel
