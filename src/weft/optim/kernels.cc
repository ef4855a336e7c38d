#include "weft/optim/kernels.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <span>

#include "weft/core/philox.h"
#include "weft/optim/pieces.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "weft/optim/kernels.cc"
#include <hwy/foreach_target.h>
// foreach_target includes this file once per instruction set; highway.h must follow it.
#include <hwy/highway.h>

#include "weft/core/bf16-inl.h"

#include "weft/optim/factors.h"

HWY_BEFORE_NAMESPACE();
namespace weft::optim::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class T>
HWY_INLINE auto load(hn::ScalableTag<T> d, const T* p) {
  return hn::LoadU(d, p);
}
HWY_INLINE auto load(hn::ScalableTag<float> d, const uint16_t* p) { return bf16::HWY_NAMESPACE::load(d, p); }

template <class T, class V>
HWY_INLINE void store(hn::ScalableTag<T> d, V v, T* p) {
  hn::StoreU(v, d, p);
}
template <class V>
HWY_INLINE void store(hn::ScalableTag<float> d, V v, uint16_t* p) {
  bf16::HWY_NAMESPACE::store(d, v, p);
}

/// weight = rule(weight, gradient, state 0, state 1) over n elements; the rule changes the states. G: T, or bf16 as its bits;
/// S, the states' type: likewise. `copy`: null, or the weights in bf16. States beyond kStates are null.
template <int kStates, class T, class G, class S, class Rule>
HWY_INLINE void Update(T* weight, const G* grad, S* state0, S* state1, uint16_t* copy, size_t n, const Rule& rule) {
  const hn::ScalableTag<T> d;
  const size_t lanes = hn::Lanes(d);
  const auto vector = [&](T* w, const G* g, S* s0, S* s1, uint16_t* c) {
    auto v0 = hn::Zero(d), v1 = hn::Zero(d);
    if constexpr (kStates > 0) v0 = load(d, s0);
    if constexpr (kStates > 1) v1 = load(d, s1);
    const auto result = rule(load(d, w), load(d, g), v0, v1);
    if constexpr (sizeof(T) == sizeof(float)) {
      if (c) bf16::HWY_NAMESPACE::store(d, result, c);
    }
    store(d, result, w);
    if constexpr (kStates > 0) store(d, v0, s0);
    if constexpr (kStates > 1) store(d, v1, s1);
  };
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    vector(weight + i, grad + i, kStates > 0 ? state0 + i : nullptr, kStates > 1 ? state1 + i : nullptr, copy ? copy + i : nullptr);
  }
  if (i == n) return;
  // The rest goes through padded scratch, so that an element's result does not depend on its position.
  constexpr size_t kMost = HWY_MAX_BYTES / sizeof(T);
  HWY_ALIGN T w[kMost] = {};
  HWY_ALIGN G g[kMost] = {};
  HWY_ALIGN S s[2][kMost] = {};
  HWY_ALIGN uint16_t c[kMost] = {};
  const size_t rest = n - i;
  std::memcpy(w, weight + i, rest * sizeof(T));
  std::memcpy(g, grad + i, rest * sizeof(G));
  if (kStates > 0) std::memcpy(s[0], state0 + i, rest * sizeof(S));
  if (kStates > 1) std::memcpy(s[1], state1 + i, rest * sizeof(S));
  vector(w, g, s[0], s[1], c);
  std::memcpy(weight + i, w, rest * sizeof(T));
  if (kStates > 0) std::memcpy(state0 + i, s[0], rest * sizeof(S));
  if (kStates > 1) std::memcpy(state1 + i, s[1], rest * sizeof(S));
  if (copy) std::memcpy(copy + i, c, rest * sizeof(uint16_t));
}

/// The operations and their order are torch::optim::AdamW's, so that results agree to rounding.
template <class T, class G, class S>
HWY_INLINE void AdamW(const AdamWFactors<T>& f, T* weight, const G* grad, S* m, S* v, uint16_t* copy, size_t n) {
  const hn::ScalableTag<T> d;
  const auto beta1 = hn::Set(d, f.beta1), rest1 = hn::Set(d, f.one_minus_beta1);
  const auto beta2 = hn::Set(d, f.beta2), rest2 = hn::Set(d, f.one_minus_beta2);
  const auto eps = hn::Set(d, f.eps), decay = hn::Set(d, f.decay), step = hn::Set(d, f.minus_step_size);
  const auto correction = hn::Set(d, f.inverse_sqrt_correction2);
  Update<2>(weight, grad, m, v, copy, n, [&](auto w, auto g, auto& mi, auto& vi) {
    mi = hn::MulAdd(g, rest1, hn::Mul(mi, beta1));
    vi = hn::MulAdd(hn::Mul(g, g), rest2, hn::Mul(vi, beta2));
    const auto denominator = hn::Add(hn::Mul(hn::Sqrt(vi), correction), eps);
    return hn::MulAdd(step, hn::Div(mi, denominator), hn::Mul(w, decay));
  });
}

/// Chen et al. 2023, algorithm 2. The sign of 0 is 0, and NaN stays NaN.
template <class T, class G>
HWY_INLINE void Lion(const LionFactors<T>& f, T* weight, const G* grad, T* m, uint16_t* copy, size_t n) {
  const hn::ScalableTag<T> d;
  const auto beta1 = hn::Set(d, f.beta1), rest1 = hn::Set(d, f.one_minus_beta1);
  const auto beta2 = hn::Set(d, f.beta2), rest2 = hn::Set(d, f.one_minus_beta2);
  const auto decay = hn::Set(d, f.decay), step = hn::Set(d, f.minus_lr), one = hn::Set(d, T{1}), zero = hn::Zero(d);
  Update<1>(weight, grad, m, static_cast<T*>(nullptr), copy, n, [&](auto w, auto g, auto& mi, auto&) {
    const auto mixed = hn::MulAdd(g, rest1, hn::Mul(mi, beta1));
    mi = hn::MulAdd(g, rest2, hn::Mul(mi, beta2));
    const auto none = hn::Or(hn::Eq(mixed, zero), hn::IsNaN(mixed));
    const auto sign = hn::IfThenElse(none, mixed, hn::CopySign(one, mixed));
    return hn::MulAdd(step, sign, hn::Mul(w, decay));
  });
}

/// torch::optim::SGD's formulas.
template <int kStates, class T, class G>
HWY_INLINE void Sgd(const SgdFactors<T>& f, T* weight, const G* grad, T* buffer, uint16_t* copy, size_t n) {
  const hn::ScalableTag<T> d;
  const auto coupled = hn::Set(d, f.weight_decay), momentum = hn::Set(d, f.momentum), fresh = hn::Set(d, f.one_minus_dampening);
  const auto step = hn::Set(d, f.minus_lr);
  const bool nesterov = f.nesterov;
  Update<kStates>(weight, grad, buffer, static_cast<T*>(nullptr), copy, n, [&](auto w, auto g, auto& b, auto&) {
    auto change = hn::MulAdd(w, coupled, g);
    if constexpr (kStates > 0) {
      b = hn::MulAdd(change, fresh, hn::Mul(b, momentum));
      change = nesterov ? hn::MulAdd(b, momentum, change) : b;
    }
    return hn::MulAdd(step, change, w);
  });
}

void AdamWFloat(const AdamWFactors<float>& f, float* w, const float* g, float* m, float* v, uint16_t* c, size_t n) { AdamW(f, w, g, m, v, c, n); }
void AdamWBf16(const AdamWFactors<float>& f, float* w, const uint16_t* g, float* m, float* v, uint16_t* c, size_t n) { AdamW(f, w, g, m, v, c, n); }
void AdamWFloatLow(const AdamWFactors<float>& f, float* w, const float* g, uint16_t* m, uint16_t* v, uint16_t* c, size_t n) { AdamW(f, w, g, m, v, c, n); }
void AdamWBf16Low(const AdamWFactors<float>& f, float* w, const uint16_t* g, uint16_t* m, uint16_t* v, uint16_t* c, size_t n) { AdamW(f, w, g, m, v, c, n); }
void AdamWDouble(const AdamWFactors<double>& f, double* w, const double* g, double* m, double* v, size_t n) { AdamW(f, w, g, m, v, nullptr, n); }
void LionFloat(const LionFactors<float>& f, float* w, const float* g, float* m, uint16_t* c, size_t n) { Lion(f, w, g, m, c, n); }
void LionBf16(const LionFactors<float>& f, float* w, const uint16_t* g, float* m, uint16_t* c, size_t n) { Lion(f, w, g, m, c, n); }
void LionDouble(const LionFactors<double>& f, double* w, const double* g, double* m, size_t n) { Lion(f, w, g, m, nullptr, n); }
void SgdFloat(const SgdFactors<float>& f, float* w, const float* g, float* b, uint16_t* c, size_t n) {
  b ? Sgd<1>(f, w, g, b, c, n) : Sgd<0>(f, w, g, b, c, n);
}
void SgdBf16(const SgdFactors<float>& f, float* w, const uint16_t* g, float* b, uint16_t* c, size_t n) {
  b ? Sgd<1>(f, w, g, b, c, n) : Sgd<0>(f, w, g, b, c, n);
}
void SgdDouble(const SgdFactors<double>& f, double* w, const double* g, double* b, size_t n) {
  b ? Sgd<1>(f, w, g, b, nullptr, n) : Sgd<0>(f, w, g, b, nullptr, n);
}

}  // namespace weft::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::optim {

HWY_EXPORT(AdamWFloat);
HWY_EXPORT(AdamWBf16);
HWY_EXPORT(AdamWFloatLow);
HWY_EXPORT(AdamWBf16Low);
HWY_EXPORT(AdamWDouble);
HWY_EXPORT(LionFloat);
HWY_EXPORT(LionBf16);
HWY_EXPORT(LionDouble);
HWY_EXPORT(SgdFloat);
HWY_EXPORT(SgdBf16);
HWY_EXPORT(SgdDouble);

void adamw_range(const AdamWFactors<float>& f, float* w, const float* g, float* m, float* v, uint16_t* copy, int64_t n) {
  HWY_DYNAMIC_DISPATCH(AdamWFloat)(f, w, g, m, v, copy, static_cast<size_t>(n));
}
void adamw_range(const AdamWFactors<double>& f, double* w, const double* g, double* m, double* v, uint16_t*, int64_t n) {
  HWY_DYNAMIC_DISPATCH(AdamWDouble)(f, w, g, m, v, static_cast<size_t>(n));
}

namespace {

/// Runs `narrow(gradient pointer)` for a piece of fp32 weights: bf16 gradients as their bits, others widened piece by piece.
template <class Fn>
void with_gradient(const Piece& piece, const at::Tensor& g, const Fn& fn) {
  if (g.scalar_type() == at::kBFloat16) return fn(static_cast<const uint16_t*>(bits_of(g, piece.begin)));
  const at::Tensor grad = piece.of(g).to(at::kFloat);
  fn(grad.const_data_ptr<float>());
}

/// `weight` [n] fp32; `copy` null or bf16.
void adamw_float(const AdamWFactors<float>& f, const Piece& piece, float* weight, const at::Tensor& g, const at::Tensor& m,
                 const at::Tensor& v, uint16_t* copy) {
  const auto n = static_cast<size_t>(piece.n);
  const bool low = m.scalar_type() == at::kBFloat16;
  with_gradient(piece, g, [&](const auto* grad) {
    if constexpr (sizeof(*grad) == sizeof(float)) {
      if (low) return HWY_DYNAMIC_DISPATCH(AdamWFloatLow)(f, weight, grad, bits_of(m, piece.begin), bits_of(v, piece.begin), copy, n);
      return HWY_DYNAMIC_DISPATCH(AdamWFloat)(f, weight, grad, piece.at<float>(m), piece.at<float>(v), copy, n);
    } else {
      if (low) return HWY_DYNAMIC_DISPATCH(AdamWBf16Low)(f, weight, grad, bits_of(m, piece.begin), bits_of(v, piece.begin), copy, n);
      return HWY_DYNAMIC_DISPATCH(AdamWBf16)(f, weight, grad, piece.at<float>(m), piece.at<float>(v), copy, n);
    }
  });
}

/// fp64 weights; moments fp64, or bf16 that are widened and rounded again piece by piece.
void adamw_double(const AdamWFactors<double>& f, const Piece& piece, const at::Tensor& w, const at::Tensor& g, const at::Tensor& m,
                  const at::Tensor& v) {
  const at::Tensor grad = piece.of(g).to(at::kDouble);  // the tensor itself if it is fp64 already
  const at::Tensor wide_m = piece.of(m).to(at::kDouble), wide_v = piece.of(v).to(at::kDouble);
  HWY_DYNAMIC_DISPATCH(AdamWDouble)
  (f, piece.at<double>(w), grad.const_data_ptr<double>(), wide_m.mutable_data_ptr<double>(), wide_v.mutable_data_ptr<double>(),
   static_cast<size_t>(piece.n));
  if (m.scalar_type() == at::kDouble) return;
  piece.of(m).copy_(wide_m);
  piece.of(v).copy_(wide_v);
}

}  // namespace

void adamw_update(const AdamWStep& step, const at::Tensor& weight, const at::Tensor& grad, const at::Tensor& exp_avg,
                  const at::Tensor& exp_avg_sq, const at::Tensor& copy) {
  if (weight.is_meta()) return;  // shapes only: there is nothing to compute
  const Copy rounded(copy, weight);
  const auto narrow = adamw_factors<float>(step);
  const auto wide = adamw_factors<double>(step);
  for_pieces(weight.numel(), [&](const Piece& piece) {
    if (weight.scalar_type() == at::kDouble) {
      adamw_double(wide, piece, weight, grad, exp_avg, exp_avg_sq);
    } else {
      adamw_float(narrow, piece, piece.at<float>(weight), grad, exp_avg, exp_avg_sq, rounded.target(piece));
    }
    rounded.finish(piece);
  });
}

void lion_update(const LionStep& step, const at::Tensor& weight, const at::Tensor& grad, const at::Tensor& exp_avg, const at::Tensor& copy) {
  if (weight.is_meta()) return;
  const Copy rounded(copy, weight);
  const auto narrow = lion_factors<float>(step);
  const auto wide = lion_factors<double>(step);
  for_pieces(weight.numel(), [&](const Piece& piece) {
    const auto n = static_cast<size_t>(piece.n);
    if (weight.scalar_type() == at::kDouble) {
      const at::Tensor g = piece.of(grad).to(at::kDouble);
      HWY_DYNAMIC_DISPATCH(LionDouble)(wide, piece.at<double>(weight), g.const_data_ptr<double>(), piece.at<double>(exp_avg), n);
    } else {
      with_gradient(piece, grad, [&](const auto* g) {
        if constexpr (sizeof(*g) == sizeof(float)) {
          HWY_DYNAMIC_DISPATCH(LionFloat)(narrow, piece.at<float>(weight), g, piece.at<float>(exp_avg), rounded.target(piece), n);
        } else {
          HWY_DYNAMIC_DISPATCH(LionBf16)(narrow, piece.at<float>(weight), g, piece.at<float>(exp_avg), rounded.target(piece), n);
        }
      });
    }
    rounded.finish(piece);
  });
}

void sgd_update(const SgdStep& step, const at::Tensor& weight, const at::Tensor& grad, const at::Tensor& momentum_buffer, const at::Tensor& copy) {
  if (weight.is_meta()) return;
  const Copy rounded(copy, weight);
  const bool has = momentum_buffer.defined();
  const auto narrow = sgd_factors<float>(step);
  const auto wide = sgd_factors<double>(step);
  for_pieces(weight.numel(), [&](const Piece& piece) {
    const auto n = static_cast<size_t>(piece.n);
    if (weight.scalar_type() == at::kDouble) {
      const at::Tensor g = piece.of(grad).to(at::kDouble);
      HWY_DYNAMIC_DISPATCH(SgdDouble)
      (wide, piece.at<double>(weight), g.const_data_ptr<double>(), has ? piece.at<double>(momentum_buffer) : nullptr, n);
    } else {
      float* buffer = has ? piece.at<float>(momentum_buffer) : nullptr;
      with_gradient(piece, grad, [&](const auto* g) {
        if constexpr (sizeof(*g) == sizeof(float)) {
          HWY_DYNAMIC_DISPATCH(SgdFloat)(narrow, piece.at<float>(weight), g, buffer, rounded.target(piece), n);
        } else {
          HWY_DYNAMIC_DISPATCH(SgdBf16)(narrow, piece.at<float>(weight), g, buffer, rounded.target(piece), n);
        }
      });
    }
    rounded.finish(piece);
  });
}

void round_stochastically(const float* values, uint16_t* out, int64_t n, uint64_t seed, uint64_t stream, uint64_t first) {
  constexpr int64_t kBlock = 1024;
  constexpr uint32_t kExponent = 0x7F800000U;  // of fp32
  constexpr uint32_t kQuietNan = 0x0040U;      // bit of bf16
  std::array<uint32_t, kBlock> random;
  for (int64_t done = 0; done < n; done += kBlock) {
    const int64_t count = std::min(kBlock, n - done);
    philox::fill_bits(std::span(random).first(static_cast<size_t>(count)), seed, stream, first + static_cast<uint64_t>(done));
    for (int64_t i = 0; i < count; ++i) {
      const auto bits = std::bit_cast<uint32_t>(values[done + i]);
      // No noise on infinities and NaN: it could carry them into other numbers.
      const bool finite = (bits & kExponent) != kExponent;
      const uint32_t noise = finite ? random[static_cast<size_t>(i)] & 0xFFFFU : 0;
      const uint32_t quiet = std::isnan(values[done + i]) ? kQuietNan : 0;
      out[done + i] = static_cast<uint16_t>((bits + noise) >> 16 | quiet);
    }
  }
}

void adamw_update_rounded(const AdamWStep& step, const at::Tensor& weight, const at::Tensor& grad, const at::Tensor& exp_avg,
                          const at::Tensor& exp_avg_sq, const Rounding& rounding) {
  if (weight.is_meta()) return;
  const auto factors = adamw_factors<float>(step);
  for_pieces(weight.numel(), [&](const Piece& piece) {
    const at::Tensor wide = piece.of(weight).to(at::kFloat);
    adamw_float(factors, piece, wide.mutable_data_ptr<float>(), grad, exp_avg, exp_avg_sq, nullptr);
    round_stochastically(wide.const_data_ptr<float>(), bits_of(weight, piece.begin), piece.n, rounding.seed + static_cast<uint64_t>(step.step),
                         rounding.stream, static_cast<uint64_t>(rounding.first + piece.begin));
  });
}

}  // namespace weft::optim
#endif
