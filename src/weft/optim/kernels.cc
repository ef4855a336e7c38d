#include "weft/optim/kernels.h"

#include <ATen/Parallel.h>

#include <cmath>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "weft/optim/kernels.cc"
#include <hwy/foreach_target.h>
// foreach_target includes this file once per instruction set; highway.h must follow it.
#include <hwy/highway.h>

#ifndef WEFT_OPTIM_FACTORS
#define WEFT_OPTIM_FACTORS
namespace weft::optim {

/// The factors of one update, in the precision of the weights.
template <class T>
struct Factors {
  T beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, minus_step_size, inverse_sqrt_correction2;
};

}  // namespace weft::optim
#endif

HWY_BEFORE_NAMESPACE();
namespace weft::optim::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// The operations and their order are torch::optim::AdamW's, so that results agree to rounding.
template <class T>
void AdamWRange(const Factors<T>& f, T* weight, const T* grad, T* m, T* v, size_t n) {
  const hn::ScalableTag<T> d;
  const auto beta1 = hn::Set(d, f.beta1), rest1 = hn::Set(d, f.one_minus_beta1);
  const auto beta2 = hn::Set(d, f.beta2), rest2 = hn::Set(d, f.one_minus_beta2);
  const auto eps = hn::Set(d, f.eps), decay = hn::Set(d, f.decay), step = hn::Set(d, f.minus_step_size);
  const auto correction = hn::Set(d, f.inverse_sqrt_correction2);
  const size_t lanes = hn::Lanes(d);
  const auto update = [&](auto w, auto g, auto& mi, auto& vi) {
    mi = hn::MulAdd(g, rest1, hn::Mul(mi, beta1));
    vi = hn::MulAdd(hn::Mul(g, g), rest2, hn::Mul(vi, beta2));
    const auto denominator = hn::Add(hn::Mul(hn::Sqrt(vi), correction), eps);
    return hn::MulAdd(step, hn::Div(mi, denominator), hn::Mul(w, decay));
  };
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    auto mi = hn::LoadU(d, m + i), vi = hn::LoadU(d, v + i);
    const auto w = update(hn::LoadU(d, weight + i), hn::LoadU(d, grad + i), mi, vi);
    hn::StoreU(w, d, weight + i);
    hn::StoreU(mi, d, m + i);
    hn::StoreU(vi, d, v + i);
  }
  if (i == n) return;
  // The rest goes through padded scratch, so that an element's result does not depend on its position.
  HWY_ALIGN T scratch[4][HWY_MAX_BYTES / sizeof(T)] = {};
  const size_t bytes = (n - i) * sizeof(T);
  const T* sources[4] = {weight + i, grad + i, m + i, v + i};
  for (int k = 0; k < 4; ++k) std::memcpy(scratch[k], sources[k], bytes);
  auto mi = hn::Load(d, scratch[2]), vi = hn::Load(d, scratch[3]);
  const auto w = update(hn::Load(d, scratch[0]), hn::Load(d, scratch[1]), mi, vi);
  hn::Store(w, d, scratch[0]);
  hn::Store(mi, d, scratch[2]);
  hn::Store(vi, d, scratch[3]);
  std::memcpy(weight + i, scratch[0], bytes);
  std::memcpy(m + i, scratch[2], bytes);
  std::memcpy(v + i, scratch[3], bytes);
}

void AdamWFloat(const Factors<float>& f, float* w, const float* g, float* m, float* v, size_t n) {
  AdamWRange(f, w, g, m, v, n);
}
void AdamWDouble(const Factors<double>& f, double* w, const double* g, double* m, double* v, size_t n) {
  AdamWRange(f, w, g, m, v, n);
}

}  // namespace weft::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::optim {

HWY_EXPORT(AdamWFloat);
HWY_EXPORT(AdamWDouble);

namespace {

/// Elements of one task: large enough to hide the cost of a task, and a multiple of any vector length.
constexpr int64_t kGrain = 1 << 15;

template <class T>
Factors<T> factors_of(const AdamWStep& s) {
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

}  // namespace

void adamw_update(const AdamWStep& step, const at::Tensor& weight, const at::Tensor& grad, const at::Tensor& exp_avg,
                  const at::Tensor& exp_avg_sq, const at::Tensor& copy) {
  const bool wide = weight.scalar_type() == at::kDouble;
  // A 16-bit gradient is widened piece by piece, so that it never exists whole in fp32.
  const bool same = grad.scalar_type() == weight.scalar_type();
  const at::Tensor w = weight.view(-1), g = grad.view(-1), m = exp_avg.view(-1), v = exp_avg_sq.view(-1);
  const at::Tensor c = copy.defined() ? copy.view(-1) : copy;
  at::parallel_for(0, w.numel(), kGrain, [&](int64_t begin, int64_t end) {
    const at::NoGradGuard no_grad;
    for (int64_t i = begin; i < end; i += kGrain) {
      const int64_t n = std::min(kGrain, end - i);
      at::Tensor piece = same ? g.narrow(0, i, n) : g.narrow(0, i, n).to(weight.scalar_type());
      const auto count = static_cast<size_t>(n);
      if (wide) {
        HWY_DYNAMIC_DISPATCH(AdamWDouble)
        (factors_of<double>(step), w.mutable_data_ptr<double>() + i, piece.const_data_ptr<double>(),
         m.mutable_data_ptr<double>() + i, v.mutable_data_ptr<double>() + i, count);
      } else {
        HWY_DYNAMIC_DISPATCH(AdamWFloat)
        (factors_of<float>(step), w.mutable_data_ptr<float>() + i, piece.const_data_ptr<float>(),
         m.mutable_data_ptr<float>() + i, v.mutable_data_ptr<float>() + i, count);
      }
      if (c.defined()) c.narrow(0, i, n).copy_(w.narrow(0, i, n));
    }
  });
}

}  // namespace weft::optim
#endif
