// The fused CPU kernels (nn/simd.h) as differentiable functions. Called through nn/functional.h and nn/rope.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <utility>

namespace weft::nn {
struct VocabPart;
}

namespace weft::nn::fused {

/// True if the kernels serve these tensors: all on the CPU (or all on the meta device, where nothing is computed), of one
/// dtype out of fp64, fp32 and bf16.
bool serves(std::initializer_list<at::Tensor> tensors);

/// As the functions of the same names in nn/functional.h and nn/rope.h. Differentiable once (a second derivative throws).
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
/// cos, sin [T, rotated] in the computing dtype.
std::pair<at::Tensor, at::Tensor> rope(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos, const at::Tensor& sin);
/// Sum of the losses; its backward may run once (the gradients are handed over, not copied). part: the rows of the vocabulary that
/// weight holds, as vocab_parallel_cross_entropy; null: all.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets, int64_t ignore_index,
                                const VocabPart* part = nullptr);

}  // namespace weft::nn::fused
