// Parts of flat buffers as tensors.
#pragma once

#include <ATen/core/Tensor.h>

namespace weft::parallel {

/// Flat buffers hold real numbers: a complex tensor takes two elements per number.
inline int64_t real_numel(const at::Tensor& t) { return t.is_complex() ? 2 * t.numel() : t.numel(); }

/// Part of `flat`'s storage from element `offset` of the storage on, in the shape of `like`, complex if `like` is. Shares the
/// storage without being a view to autograd: zero_grad() detaches gradients in place, which a view refuses.
at::Tensor part_of(const at::Tensor& flat, int64_t offset, const at::Tensor& like);

/// [numel] of `dtype` on a stretch of `memory`'s bytes, from byte `offset` on, with a storage of its own: it has its own access
/// state and version. Keeps `memory` alive.
at::Tensor alias_of(const at::Tensor& memory, int64_t offset, int64_t numel, at::ScalarType dtype);

/// Whether two tensors begin at the same place. (Meta tensors have no address: of one storage, with one offset.)
bool same_place(const at::Tensor& a, const at::Tensor& b);

/// The value of a tensor of one element; 0 for a meta tensor, which has none.
double number_of(const at::Tensor& scalar);

}  // namespace weft::parallel
