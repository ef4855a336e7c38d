#include "weft/nn/weight_gradients.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "weft/autograd/collectives.h"

namespace weft::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor rows(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }

at::Tensor shared_by(const Comm& copies, const at::Tensor& weight) {
  return copies.size() > 1 && weight.defined() ? autograd::copy_to(weight, copies) : weight;
}

/// Carries what is no tensor through the graph.
struct Target : torch::CustomClassHolder {
  Target(std::shared_ptr<WeightGradients> g, at::Tensor w, Comm c) : gradients(std::move(g)), weight(std::move(w)), copies(std::move(c)) {}
  std::shared_ptr<WeightGradients> gradients;
  at::Tensor weight;
  Comm copies;
};

/// The graph has no edge to the weight: its gradient comes by another way.
class SplitLinear : public torch::autograd::Function<SplitLinear> {
 public:
  /// anchor: needs a gradient, so that backward comes here when x needs none.
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& /*anchor*/,
                            const c10::intrusive_ptr<Target>& target) {
    ctx->save_for_backward({x, weight});
    ctx->saved_data["target"] = c10::IValue::make_capsule(target);
    ctx->saved_data["bias"] = bias.has_value();
    return at::linear(x, weight, bias);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &dy = grads[0];
    const auto holder = ctx->saved_data["target"].toCapsule();
    const auto& target = static_cast<const Target&>(*holder);
    if (target.weight.requires_grad()) {
      target.gradients->put(target.weight, target.copies, [x, dy] { return at::matmul(rows(dy).t(), rows(x)); });
    }
    at::Tensor dx, dbias;
    if (ctx->needs_input_grad(0)) dx = at::matmul(dy, weight);
    if (ctx->saved_data["bias"].toBool()) dbias = rows(dy).sum(0);
    return {dx, at::Tensor(), dbias, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

void WeightGradients::put(at::Tensor weight, Comm copies, std::function<at::Tensor()> product) {
  owed_[key_].push_back({std::move(weight), std::move(copies), std::move(product)});
}

void WeightGradients::run(int64_t key) {
  auto node = owed_.extract(key);
  if (node.empty()) return;
  torch::autograd::edge_list roots;
  variable_list gradients;
  for (Entry& entry : node.mapped()) {
    const at::AutoGradMode enabled(true);
    roots.push_back(torch::autograd::impl::gradient_edge(shared_by(entry.copies, entry.weight)));
    const at::NoGradGuard no_grad;
    gradients.push_back(entry.product());
    entry = {};  // its tensors end here, not with the last product
  }
  torch::autograd::Engine::get_default_engine().execute(roots, gradients, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true);
}

size_t WeightGradients::owed() const {
  size_t count = 0;
  for (const auto& [key, entries] : owed_) count += entries.size();
  return count;
}

at::Tensor SplitsBackward::linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const Comm& copies) const {
  if (!gradients_ || !at::GradMode::is_enabled()) return at::linear(x, shared_by(copies, weight), shared_by(copies, bias));
  const std::optional<at::Tensor> offset = bias.defined() ? std::optional(shared_by(copies, bias)) : std::nullopt;
  const at::Tensor anchor = at::empty({0}, x.options().dtype(weight.scalar_type())).requires_grad_(true);
  return SplitLinear::apply(x, weight.detach(), offset, anchor, c10::make_intrusive<Target>(gradients_, weight, copies));
}

}  // namespace weft::nn
