#include "weft/nn/mlp.h"

#include <ATen/ATen.h>

#include "weft/nn/functional.h"

namespace weft::nn {

MlpImpl::MlpImpl(int64_t hidden, const model::MlpSpec& spec, Kernels kernels, const at::TensorOptions& options)
    : activation_(spec.activation), kernels_(kernels) {
  w1 = register_module("w1", Linear(hidden, spec.ffn, spec.bias, options));
  if (spec.gated) w3 = register_module("w3", Linear(hidden, spec.ffn, spec.bias, options));
  w2 = register_module("w2", Linear(spec.ffn, hidden, spec.bias, options));
}

at::Tensor MlpImpl::forward(const at::Tensor& x) {
  if (w3) return w2(gated(w1(x), w3(x), activation_, kernels_));
  return w2(activate(w1(x), activation_));
}

}  // namespace weft::nn
