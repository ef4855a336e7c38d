#include "weft/train/describe.h"

#include <ATen/ops/ones_like.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/core/error.h"
#include "weft/core/json.h"
#include "weft/memory/allocation_probe.h"

namespace weft {
namespace {

using Arguments = c10::ArrayRef<const c10::IValue>;

double product(const at::Tensor& a, const at::Tensor& b) { return 2.0 * static_cast<double>(a.numel()) * static_cast<double>(b.size(-1)); }

/// Of a convolution's forward: a multiply-add per element of the result (transposed: of the input) and weight that it meets.
double convolution(const at::Tensor& input, const at::Tensor& weight, Arguments geometry) {
  const bool transposed = geometry[3].toBool();
  double places = transposed ? static_cast<double>(input.numel()) : static_cast<double>(input.size(0) * weight.size(0));
  if (!transposed) {
    const auto stride = geometry[0].toIntVector(), padding = geometry[1].toIntVector(), dilation = geometry[2].toIntVector();
    const auto of = [](const std::vector<int64_t>& values, size_t i) { return values.size() == 1 ? values[0] : values[i]; };
    for (int64_t d = 2; d < input.dim(); ++d) {
      const auto i = static_cast<size_t>(d - 2);
      places *= static_cast<double>((input.size(d) + 2 * of(padding, i) - of(dilation, i) * (weight.size(d) - 1) - 1) / of(stride, i) + 1);
    }
  }
  return 2 * places * static_cast<double>(weight.numel() / weight.size(0));
}

double attention(const at::Tensor& q, const at::Tensor& k, bool causal) {
  return 4.0 * static_cast<double>(q.numel()) * static_cast<double>(k.size(2)) * (causal ? 0.5 : 1);
}

/// 0 for calls without products.
double flops_of(std::string_view name, Arguments in) {
  const auto t = [&](size_t i) -> const at::Tensor& { return in[i].toTensor(); };
  if (name == "aten::mm" || name == "aten::bmm") return product(t(0), t(1));
  if (name == "aten::addmm" || name == "aten::addmm_" || name == "aten::baddbmm" || name == "aten::baddbmm_") return product(t(1), t(2));
  if (name == "aten::convolution") return convolution(t(0), t(1), in.slice(3));
  if (name == "aten::convolution_backward") {
    const auto needed = in[10].toBoolList();
    return ((needed[0] ? 1 : 0) + (needed[1] ? 1 : 0)) * convolution(t(1), t(2), in.slice(4));
  }
  if (name == "aten::_scaled_dot_product_flash_attention_for_cpu") return attention(t(0), t(1), in[4].toBool());
  if (name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward") return 2.5 * attention(t(1), t(2), in[7].toBool());
  return 0;
}

thread_local double* counted = nullptr;
thread_local bool inside = false;  // of a call that was counted: what it is made of is not

struct Counted : at::ObserverContext {
  ~Counted() override { inside = false; }
};

std::unique_ptr<at::ObserverContext> begin_call(const at::RecordFunction& fn) {
  if (inside || counted == nullptr) return nullptr;
  const double flops = flops_of(fn.name(), fn.inputs());
  if (flops <= 0) return nullptr;
  *counted += flops;
  inside = true;
  return std::make_unique<Counted>();
}

class FlopCounter {
 public:
  explicit FlopCounter(double& flops) {
    counted = &flops;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&begin_call).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  }
  ~FlopCounter() {
    at::removeCallback(handle_);
    counted = nullptr;
  }
  FlopCounter(const FlopCounter&) = delete;
  FlopCounter& operator=(const FlopCounter&) = delete;

 private:
  at::CallbackHandle handle_;
};

/// Drops each gradient as soon as it has landed.
class DropGradient final : public torch::autograd::PostAccumulateGradHook {
 public:
  void operator()(const torch::autograd::Variable& tensor) override { tensor.mutable_grad() = at::Tensor(); }
};

/// While it lives, parameters are as before their first backward, and stay so: gradients are no part of what is counted, and nobody
/// who waits for them is told.
class WithoutGradients {
 public:
  explicit WithoutGradients(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
    for (const at::Tensor& p : parameters_) {
      kept_.push_back(p.grad());
      p.mutable_grad() = at::Tensor();
      hooks_.push_back(std::make_unique<DropGradient>());
    }
    swap_hooks();
  }
  ~WithoutGradients() {
    swap_hooks();
    for (size_t i = 0; i < kept_.size(); ++i) parameters_[i].mutable_grad() = kept_[i];
  }
  WithoutGradients(const WithoutGradients&) = delete;
  WithoutGradients& operator=(const WithoutGradients&) = delete;

 private:
  void swap_hooks() {
    for (size_t i = 0; i < parameters_.size(); ++i) std::swap(torch::autograd::impl::materialize_autograd_meta(parameters_[i])->post_acc_grad_hooks_, hooks_[i]);
  }

  std::vector<at::Tensor> parameters_, kept_;
  std::vector<std::unique_ptr<torch::autograd::PostAccumulateGradHook>> hooks_;
};

double count_of(const std::vector<at::Tensor>& tensors) {
  double count = 0;
  for (const at::Tensor& t : tensors) count += static_cast<double>(t.numel());
  return count;
}

std::vector<at::Tensor> trainable_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> out;
  std::copy_if(parameters.begin(), parameters.end(), std::back_inserter(out), [](const at::Tensor& p) { return p.requires_grad(); });
  return out;
}

}  // namespace

ProgramSpec describe(torch::nn::Module& module, int64_t samples, const std::function<at::Tensor()>& forward, const std::string& name) {
  const std::vector<at::Tensor> parameters = module.parameters(), trainable = trainable_of(parameters);
  if (trainable.empty()) throw ConfigError("weft::describe: " + name + " has no trainable parameters, so there is nothing to plan");
  if (samples < 1) throw ConfigError("weft::describe: " + name + ": the batch has no samples; give inputs whose first dim is at least 1");
  const at::Device device = parameters.front().device();
  if (!device.is_cpu() && !device.is_meta())
    throw ConfigError("weft::describe: " + name + " lies on " + device.str() + "; describe it on the CPU or, without memory, on the meta device, before it moves");
  ProgramSpec spec;
  spec.name = name;
  spec.samples = samples;
  spec.element = static_cast<int64_t>(parameters.front().element_size());
  spec.parameters = count_of(parameters);
  spec.trainable = count_of(trainable);
  for (const auto& child : module.children()) spec.largest_unit = std::max(spec.largest_unit, count_of(child->parameters()));
  const WithoutGradients without(trainable);
  const memory::RequestCounter bytes(device.type());
  const auto counted = [&](double& flops, const std::function<at::Tensor()>& call) {
    const FlopCounter counter(flops);
    try {
      return call();
    } catch (const c10::NotImplementedError& error) {
      if (!device.is_meta()) throw;
      throw ConfigError("weft::describe: " + name + " cannot be counted without values (" + error.what_without_backtrace() + "); describe it on the CPU, with few samples");
    }
  };
  at::Tensor result = counted(spec.forward_flops, forward);
  if (!result.defined() || !result.requires_grad())
    throw ConfigError("weft::describe: the result of " + name + " does not depend on its trainable parameters; return what is differentiated");
  spec.saved_bytes = static_cast<double>(bytes.now().live);
  result = counted(spec.backward_flops, [&] { return result.backward(at::ones_like(result)), at::Tensor(); });
  const memory::RequestCount all = bytes.now();
  // Each gradient exists for a moment beside the activations; that of the largest parameter is the planner's to add.
  double largest = 0;
  for (const at::Tensor& p : trainable) largest = std::max(largest, static_cast<double>(p.nbytes()));
  spec.peak_bytes = std::max(spec.saved_bytes, static_cast<double>(all.peak) - largest);
  spec.moved_bytes = static_cast<double>(all.total);
  spec.kernels = static_cast<double>(all.blocks);
  return spec;
}

void write_spec(const ProgramSpec& spec, const std::string& path) { write_text(path, plan::to_json(spec).dump(2) + "\n"); }

}  // namespace weft
