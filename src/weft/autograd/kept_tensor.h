// A saved tensor that stays where it is.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace weft::autograd {

/// Memory of a tensor's elements, by identity; null for tensors without.
inline const void* memory_of(const at::Tensor& tensor) { return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr; }

/// With the check that nobody changes it before it is used: autograd makes none where hooks keep its tensors.
struct KeptTensor {
  at::Tensor alias;
  int64_t version = -1;  ///< -1: the tensor has none

  /// Without the graph behind it.
  static KeptTensor of(const at::Tensor& tensor) { return {tensor.detach(), version_of(tensor)}; }
  static int64_t version_of(const at::Tensor& tensor) { return tensor.is_inference() ? -1 : static_cast<int64_t>(tensor._version()); }
  bool unchanged() const { return version < 0 || static_cast<int64_t>(alias._version()) == version; }
};

}  // namespace weft::autograd
