// Loops over raw memory, vectorised for the CPU that runs them (Highway, dispatch at run time). Free of torch.
// T: double, float, or uint16_t for the bits of bf16; arithmetic is in C: double for double, else float.
#pragma once

#include <cstdint>
#include <type_traits>

namespace weft::nn::simd {

using Bf16Bits = uint16_t;

template <class T>
using Computed = std::conditional_t<std::is_same_v<T, double>, double, float>;

/// y = x * rstd * weight per row; x, y [rows, n], weight [n], rstd [rows] = 1 / sqrt(mean(x^2) + eps).
template <class T>
void rms_norm_forward(const T* x, const T* weight, double eps, T* y, Computed<T>* rstd, int64_t rows, int64_t n);
/// dx of rms_norm; dweight [n] is added to.
template <class T>
void rms_norm_backward(const T* dy, const T* x, const T* weight, const Computed<T>* rstd, T* dx, Computed<T>* dweight,
                       int64_t rows, int64_t n);

/// y = silu(gate) * up.
template <class T>
void swiglu_forward(const T* gate, const T* up, T* y, int64_t n);
template <class T>
void swiglu_backward(const T* dy, const T* gate, const T* up, T* dgate, T* dup, int64_t n);

/// Rotates the pairs (i, i + rotated / 2) of the first `rotated` channels of each head; the rest is copied. x, y [heads,
/// head_dim] of one token; cos, sin [rotated / 2]. direction -1 turns back, which is the gradient.
template <class T>
void rope_token(const T* x, const Computed<T>* cos, const Computed<T>* sin, T* y, int64_t heads, int64_t head_dim,
                int64_t rotated, int direction);

/// Cross-entropy of one row of logits [n] against `target`: returns the loss. With `gradient` the logits become
/// softmax - onehot. scratch [n] is used for 16-bit types.
template <class T>
double cross_entropy_row(T* logits, int64_t n, int64_t target, bool gradient, Computed<T>* scratch);

/// The two halves of that for a row whose classes are shared out over ranks, n >= 1 of them here; target is negative when another
/// rank has it. Begin: the largest logit, the sum of exp(logit - largest) and the target's logit, or 0; with `gradient` a row of
/// fp64 or fp32 then holds these exponentials. End: such a row (a 16-bit row: logits still) becomes softmax - onehot, where
/// log_total is the logarithm of the sum of exp(logit) over all ranks' classes.
struct RowShare {
  double largest, sum, at_target;
};
template <class T>
RowShare softmax_begin(T* logits, int64_t n, int64_t target, bool gradient);
template <class T>
void softmax_end(T* row, int64_t n, double largest, double log_total, int64_t target);

}  // namespace weft::nn::simd
