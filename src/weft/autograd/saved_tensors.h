// How autograd keeps what it saves for backward: the hook below recompute and offload of activations.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace torch::autograd {
struct SavedVariableHooks;
}

namespace weft::autograd {

/// Asked once for every tensor that autograd saves on this thread.
class SavedTensors {
 public:
  virtual ~SavedTensors() = default;
  /// Null: the tensor is kept as ever.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> hook() = 0;
};

/// While it lives, what this thread saves goes through `how`; null: as without Weft. The innermost counts.
class SavedTensorScope {
 public:
  explicit SavedTensorScope(SavedTensors* how);
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;

 private:
  SavedTensors* outer_;
};

/// A backward that is itself to be differentiated (create_graph) saves tensors too, and among them may be memory that comes and
/// goes, as sharded parameters do. `before_use` runs before a saved tensor in `memory` (kept_tensor.h) is handed out, in the
/// backward that asks for it. Takes effect with install_saved_tensor_hooks(). From any thread.
void watch_memory(const void* memory, std::function<void()> before_use);
void unwatch_memory(const void* memory);

/// Lets scopes and watches act. libtorch asks its autograd engine for such hooks, so this puts in front of it one that passes everything
/// else on; nothing else changes, and a process that never calls this is left alone. Cheap when it is done already.
/// ConfigError when something else has replaced the engine, as Python's torch does.
void install_saved_tensor_hooks();

}  // namespace weft::autograd
