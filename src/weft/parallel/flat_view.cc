#include "weft/parallel/flat_view.h"

#include <ATen/ops/empty.h>

namespace weft::parallel {

at::Tensor part_of(const at::Tensor& flat, int64_t offset, const at::Tensor& like) {
  const auto dtype = like.is_complex() ? c10::toComplexType(flat.scalar_type()) : flat.scalar_type();
  const at::Tensor contiguous = at::empty(like.sizes(), like.options().dtype(dtype).device(at::kMeta).requires_grad(false));
  at::Tensor part = at::empty({0}, flat.options().dtype(dtype));
  part.set_(flat.storage(), offset / (like.is_complex() ? 2 : 1), like.sizes(), contiguous.strides());
  return part;
}

}  // namespace weft::parallel
