// The factors of one update, in the precision of the weights, and the loop over raw memory for kernels that unpack their states.
#pragma once

#include <cmath>
#include <cstdint>

#include "weft/optim/kernels.h"

namespace weft::optim {

template <class T>
struct AdamWFactors {
  T beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, minus_step_size, inverse_sqrt_correction2;
};

template <class T>
AdamWFactors<T> adamw_factors(const AdamWStep& s) {
  const double correction1 = 1 - std::pow(s.beta1, static_cast<double>(s.step));
  const double correction2 = 1 - std::pow(s.beta2, static_cast<double>(s.step));
  return {.beta1 = static_cast<T>(s.beta1),
          .one_minus_beta1 = static_cast<T>(1 - s.beta1),
          .beta2 = static_cast<T>(s.beta2),
          .one_minus_beta2 = static_cast<T>(1 - s.beta2),
          .eps = static_cast<T>(s.eps),
          .decay = static_cast<T>(1 - s.lr * s.weight_decay),
          .minus_step_size = static_cast<T>(-s.lr / correction1),
          .inverse_sqrt_correction2 = static_cast<T>(1 / std::sqrt(correction2))};
}

template <class T>
struct LionFactors {
  T beta1, one_minus_beta1, beta2, one_minus_beta2, decay, minus_lr;
};

template <class T>
LionFactors<T> lion_factors(const LionStep& s) {
  return {.beta1 = static_cast<T>(s.beta1),
          .one_minus_beta1 = static_cast<T>(1 - s.beta1),
          .beta2 = static_cast<T>(s.beta2),
          .one_minus_beta2 = static_cast<T>(1 - s.beta2),
          .decay = static_cast<T>(1 - s.lr * s.weight_decay),
          .minus_lr = static_cast<T>(-s.lr)};
}

template <class T>
struct SgdFactors {
  T weight_decay, momentum, one_minus_dampening, minus_lr;
  bool nesterov;
};

template <class T>
SgdFactors<T> sgd_factors(const SgdStep& s) {
  return {.weight_decay = static_cast<T>(s.weight_decay),
          .momentum = static_cast<T>(s.momentum),
          .one_minus_dampening = static_cast<T>(s.first ? 1 : 1 - s.dampening),  // on a buffer of zeros
          .minus_lr = static_cast<T>(-s.lr),
          .nesterov = s.nesterov};
}

/// AdamW on n elements of raw memory, in this thread. `copy`: null, or the weights in bf16 (fp32 only).
void adamw_range(const AdamWFactors<float>& f, float* w, const float* g, float* m, float* v, uint16_t* copy, int64_t n);
void adamw_range(const AdamWFactors<double>& f, double* w, const double* g, double* m, double* v, uint16_t* copy, int64_t n);

}  // namespace weft::optim
