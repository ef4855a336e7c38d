#include "weft/parallel/flat_view.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/strides.h>

namespace weft::parallel {

at::Tensor part_of(const at::Tensor& flat, int64_t offset, const at::Tensor& like) {
  const auto dtype = like.is_complex() ? c10::toComplexType(flat.scalar_type()) : flat.scalar_type();
  at::Tensor part = at::empty({0}, flat.options().dtype(dtype));
  part.set_(flat.storage(), offset / (like.is_complex() ? 2 : 1), like.sizes(), c10::contiguous_strides(like.sizes()));
  return part;
}

at::Tensor alias_of(const at::Tensor& memory, int64_t offset, int64_t numel, at::ScalarType dtype) {
  const auto options = memory.options().dtype(dtype);
  if (!memory.is_meta()) {
    auto* data = static_cast<char*>(memory.mutable_data_ptr()) + offset;
    return at::from_blob(data, {numel}, [keep = memory](void*) {}, options);
  }
  const auto bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  // Resizable, or set_() refuses it on the meta device; nobody resizes it.
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, memory.device()), memory.storage().allocator(), true);
  at::Tensor alias = at::empty({0}, options);
  alias.set_(storage, 0, {numel}, {1});
  return alias;
}

bool same_place(const at::Tensor& a, const at::Tensor& b) {
  if (!a.is_meta() || !b.is_meta()) return a.const_data_ptr() == b.const_data_ptr();
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl() && a.storage_offset() == b.storage_offset();
}

double number_of(const at::Tensor& scalar) { return scalar.is_meta() ? 0.0 : scalar.item<double>(); }

}  // namespace weft::parallel
