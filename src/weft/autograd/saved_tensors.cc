#include "weft/autograd/saved_tensors.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <atomic>
#include <map>
#include <mutex>
#include <utility>

#include "weft/autograd/kept_tensor.h"
#include "weft/core/error.h"

namespace weft::autograd {
namespace {

using torch::autograd::Engine;
using torch::autograd::GraphTask;
using torch::autograd::Node;
using torch::autograd::SavedVariableHooks;

thread_local SavedTensors* innermost = nullptr;

/// Watched memory of all engines of the process.
struct Watches {
  std::mutex mutex;
  std::map<const void*, std::function<void()>> before_use;
  std::atomic<size_t> count = 0;

  std::function<void()> of(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex);
    const auto found = before_use.find(memory_of(tensor));
    return found == before_use.end() ? std::function<void()>() : found->second;
  }
};
Watches& watches() {
  static auto* const all = new Watches;  // graphs may outlive static objects
  return *all;
}

/// Saved by a backward: as ever, but for what is watched.
class Watched final : public SavedVariableHooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override {
    kept_ = KeptTensor::of(tensor);
    before_use_ = watches().of(tensor);
  }
  at::Tensor call_unpack_hook() override {
    if (before_use_) before_use_();
    if (!kept_.unchanged()) {
      throw ConfigError("a tensor that a second derivative needs has been modified by an in-place operation since the first one. Modify a "
                        "copy, or run backward first");
    }
    return kept_.alias;
  }

 private:
  KeptTensor kept_;
  std::function<void()> before_use_;
};

bool in_differentiable_backward() { return at::GradMode::is_enabled() && torch::autograd::get_current_graph_task_id() >= 0; }

/// libtorch's engine does the work, with its threads and queues, so that a switch between two backwards is harmless.
class HookingEngine final : public Engine {
 public:
  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots, const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return get_base_engine().execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(const std::shared_ptr<GraphTask>& graph_task,
                                                                 c10::intrusive_ptr<Node> graph_root,
                                                                 torch::autograd::InputBuffer&& input_buffer) override {
    return get_base_engine().execute_with_graph_task(graph_task, std::move(graph_root), std::move(input_buffer));
  }
  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (innermost != nullptr) return innermost->hook();
    if (watches().count > 0 && in_differentiable_backward()) return std::make_unique<Watched>();
    return nullptr;
  }
};

Engine& hooking_engine() {
  static auto* const engine = new HookingEngine;  // for good: graphs may outlive static objects
  return *engine;
}

}  // namespace

SavedTensorScope::SavedTensorScope(SavedTensors* how) : outer_(std::exchange(innermost, how)) {}
SavedTensorScope::~SavedTensorScope() { innermost = outer_; }

void watch_memory(const void* memory, std::function<void()> before_use) {
  Watches& all = watches();
  const std::lock_guard lock(all.mutex);
  all.before_use[memory] = std::move(before_use);
  all.count = all.before_use.size();
}

void unwatch_memory(const void* memory) {
  Watches& all = watches();
  const std::lock_guard lock(all.mutex);
  all.before_use.erase(memory);
  all.count = all.before_use.size();
}

void install_saved_tensor_hooks() {
  Engine* const current = &Engine::get_default_engine();
  if (current == &hooking_engine()) return;
  if (current != &Engine::get_base_engine()) {
    throw ConfigError("recompute, offload of activations and second derivatives through sharded parameters need libtorch's own autograd "
                      "engine, and this process has another one (Python's torch brings its own). Do without them in such a process");
  }
  torch::autograd::set_default_engine_stub(hooking_engine);
}

}  // namespace weft::autograd
