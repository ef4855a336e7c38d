// Tensors whose data is absent or out of date: touching them throws instead of reading what is not there.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace weft::parallel {

/// From here on every access to the data of `flat`'s storage, through any tensor on it, throws a c10::Error with `message`.
/// The data itself stays.
void forbid_access(const at::Tensor& flat, const std::string& message);

/// Ends forbid_access().
void allow_access(const at::Tensor& flat);

/// Frees the data of `flat`'s storage; tensors on it keep their shapes, and accesses throw `message`.
void release_data(const at::Tensor& flat, const std::string& message);

/// Uninitialised data again, at a new address. Does not bump version counters: what autograd saved stays valid once the old
/// values are written back through raw pointers.
void restore_data(const at::Tensor& flat);

}  // namespace weft::parallel
