// One-pass update loops over raw memory, vectorised for the CPU that runs them. All tensors flat and dense; extra threads as
// at::parallel_for has them; an element's result does not depend on its position.
#pragma once

#include <ATen/core/Tensor.h>

namespace weft::optim {

struct AdamWStep {
  double lr, beta1, beta2, eps, weight_decay;
  int64_t step;  ///< number of this update, from 1
};

/// Updates `weight` [n], `exp_avg` [n], `exp_avg_sq` [n] (all fp32 or all fp64; both moments may be bf16) from `grad` [n] (their
/// dtype, bf16 or fp16), and writes the rounded weight to `copy` [n] (bf16 or fp16) if that is defined.
void adamw_update(const AdamWStep& step, const at::Tensor& weight, const at::Tensor& grad, const at::Tensor& exp_avg,
                  const at::Tensor& exp_avg_sq, const at::Tensor& copy);

struct LionStep {
  double lr, beta1, beta2, weight_decay;
};

/// The same for Lion and its only moment.
void lion_update(const LionStep& step, const at::Tensor& weight, const at::Tensor& grad, const at::Tensor& exp_avg, const at::Tensor& copy);

struct SgdStep {
  double lr, momentum, dampening, weight_decay;
  bool nesterov = false;
  bool first = false;  ///< of the parameter: the momentum buffer becomes its gradient
};

/// The same for SGD. `momentum_buffer` [n] is undefined without momentum.
void sgd_update(const SgdStep& step, const at::Tensor& weight, const at::Tensor& grad, const at::Tensor& momentum_buffer, const at::Tensor& copy);

/// Where the random bits of stochastic rounding come from: element i of the tensor takes bits (seed + step, stream, first + i)
/// of Philox, so that numbers do not depend on how a parameter is cut over ranks.
struct Rounding {
  uint64_t seed = 0;
  uint64_t stream = 0;  ///< of the parameter, philox::stream_of(name)
  int64_t first = 0;    ///< global index of the tensor's first element
};

/// Rounds fp32 `values` [n] to bf16 bits: down or up with probabilities that make the expectation exact.
void round_stochastically(const float* values, uint16_t* out, int64_t n, uint64_t seed, uint64_t stream, uint64_t first);

/// The update of a bf16 `weight` [n] without master copy, rounded stochastically; moments fp32, or both bf16.
void adamw_update_rounded(const AdamWStep& step, const at::Tensor& weight, const at::Tensor& grad, const at::Tensor& exp_avg,
                          const at::Tensor& exp_avg_sq, const Rounding& rounding);

/// Elements that share a scale in 8-bit moments (Dettmers et al. 2022, section 2.1; bitsandbytes has 256 for optimizers, too).
inline constexpr int64_t kQuantBlock = 256;

/// A moment in 8 bits: an element is the value of its code times the scale of its block.
struct QuantMoment {
  at::Tensor codes;   ///< [n] uint8; all zeros with scales of zero: zeros
  at::Tensor scales;  ///< [ceil(n / kQuantBlock)] weight's dtype: the largest magnitude of the block
};

/// AdamW with moments that are unpacked, updated and packed again block by block. `weight` begins with a block.
void adam8bit_update(const AdamWStep& step, const at::Tensor& weight, const at::Tensor& grad, const QuantMoment& exp_avg,
                     const QuantMoment& exp_avg_sq, const at::Tensor& copy);

}  // namespace weft::optim
