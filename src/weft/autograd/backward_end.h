// An anchor at the end of backward.
#pragma once

#include <functional>

namespace weft::autograd {

/// Called from inside a backward (a hook or a custom Function): runs `fn` once, on this thread, when the outermost
/// backward() that is running has computed all its gradients and before it returns. A nested backward (reentrant
/// recomputation) does not trigger it. An exception from `fn` reaches the caller of backward(). If backward itself
/// throws, `fn` never runs.
void at_backward_end(std::function<void()> fn);

}  // namespace weft::autograd
