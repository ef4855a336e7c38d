// One-pass update loops over raw memory, vectorised for the CPU that runs them.
#pragma once

#include <ATen/core/Tensor.h>

namespace weft::optim {

struct AdamWStep {
  double lr, beta1, beta2, eps, weight_decay;
  int64_t step;  ///< number of this update, from 1
};

/// Updates `weight` [n], `exp_avg` [n], `exp_avg_sq` [n] (all fp32 or all fp64) from `grad` [n] (their dtype, bf16 or
/// fp16), and writes the rounded weight to `copy` [n] (bf16 or fp16) if that is defined. All dense; extra threads as
/// at::parallel_for has them.
void adamw_update(const AdamWStep& step, const at::Tensor& weight, const at::Tensor& grad, const at::Tensor& exp_avg,
                  const at::Tensor& exp_avg_sq, const at::Tensor& copy);

}  // namespace weft::optim
