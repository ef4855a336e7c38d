#include "weft/nn/mlp.h"

#include <ATen/ATen.h>

#include "weft/layout/part.h"
#include "weft/nn/functional.h"

namespace weft::nn {

MlpImpl::MlpImpl(int64_t hidden, const model::MlpSpec& spec, Kernels kernels, const at::TensorOptions& options,
                 const TensorAxis& tp)
    : tp_(tp), activation_(spec.activation), kernels_(kernels) {
  const int64_t ffn = layout::part_of(spec.ffn, tp.size(), tp.rank()).size;
  w1 = register_module("w1", Linear(hidden, ffn, spec.bias, options));
  if (spec.gated) w3 = register_module("w3", Linear(hidden, ffn, spec.bias, options));
  w2 = register_module("w2", RowLinear(ffn, hidden, spec.bias, options, tp));
}

at::Tensor MlpImpl::forward(const at::Tensor& input) {
  if (!w3) return w2(activate(column_products(tp_, input, {w1})[0], activation_));
  const std::vector<at::Tensor> y = column_products(tp_, input, {w1, w3});
  return w2(gated(y[0], y[1], activation_, kernels_));
}

}  // namespace weft::nn
