#include "weft/autograd/backward_end.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <utility>

namespace weft::autograd {
namespace {

using torch::autograd::variable_list;

/// Runs once after the node that contains a nested backward; from there on the outer backward is the current one.
class AfterNode : public torch::autograd::FunctionPostHook {
 public:
  explicit AfterNode(std::function<void()> fn) : fn_(std::move(fn)) {}
  variable_list operator()(const variable_list& grad_inputs, const variable_list&) override {
    if (auto fn = std::exchange(fn_, nullptr)) at_backward_end(std::move(fn));
    return grad_inputs;
  }

 private:
  std::function<void()> fn_;
};

}  // namespace

void at_backward_end(std::function<void()> fn) {
  torch::autograd::Engine::get_default_engine().queue_callback([fn = std::move(fn)] {
    // Callbacks run after the last node of their graph. A current node can only belong to an outer backward.
    if (auto outer = torch::autograd::get_current_node()) {
      outer->add_post_hook(std::make_unique<AfterNode>(fn));
    } else {
      fn();
    }
  });
}

}  // namespace weft::autograd
