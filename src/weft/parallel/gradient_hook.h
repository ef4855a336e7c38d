// A callback after autograd has accumulated a parameter's gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

namespace weft::parallel {

/// Calls `fn` each time backward has accumulated into `parameter.grad()`. libtorch has one hook slot per tensor, so a hook
/// that is already there is kept and runs first. Throws ConfigError naming `name` if a DataParallel watches it already.
/// `backward_begins`: for backward_begin_of().
void watch_gradient(const at::Tensor& parameter, const std::string& name, std::function<void()> fn,
                    std::function<void()> backward_begins = {});

/// What whoever knows that a backward to this parameter begins may call, inside it: the way from a loss to the engine. Empty if
/// nothing watches the parameter.
std::function<void()> backward_begin_of(const at::Tensor& parameter);

/// Undoes watch_gradient; the earlier hook is put back. No-op if nothing is watched.
void unwatch_gradient(const at::Tensor& parameter);

}  // namespace weft::parallel
