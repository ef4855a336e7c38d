// The way from a shard, which is all an optimizer sees, to the engine that has to gather it.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace weft::parallel {

/// `updated` is called when an optimizer has written `shard`.
void set_owner(const at::Tensor& shard, std::function<void()> updated);

/// Weft's optimizers call it for each of their parameters at the end of a step. No-op for tensors without owner.
void notify_updated(const at::Tensor& parameter);

}  // namespace weft::parallel
