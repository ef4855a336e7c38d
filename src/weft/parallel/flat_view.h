// Parts of flat buffers as tensors.
#pragma once

#include <ATen/core/Tensor.h>

namespace weft::parallel {

/// Flat buffers hold real numbers: a complex tensor takes two elements per number.
inline int64_t real_numel(const at::Tensor& t) { return t.is_complex() ? 2 * t.numel() : t.numel(); }

/// Part of `flat`'s storage from element `offset` of the storage on, in the shape of `like`, complex if `like` is. Shares the
/// storage without being a view to autograd: zero_grad() detaches gradients in place, which a view refuses.
at::Tensor part_of(const at::Tensor& flat, int64_t offset, const at::Tensor& like);

}  // namespace weft::parallel
