#include "weft/optim/kernels.h"

#include <ATen/Parallel.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <span>

#include "weft/core/philox.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "weft/optim/kernels.cc"
#include <hwy/foreach_target.h>
// foreach_target includes this file once per instruction set; highway.h must follow it.
#include <hwy/highway.h>

#include "weft/core/bf16-inl.h"

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

template <class T>
HWY_INLINE auto load(hn::ScalableTag<T> d, const T* p) {
  return hn::LoadU(d, p);
}
HWY_INLINE auto load(hn::ScalableTag<float> d, const uint16_t* p) { return bf16::HWY_NAMESPACE::load(d, p); }

/// The operations and their order are torch::optim::AdamW's, so that results agree to rounding. G: T, or bf16 as its bits.
/// `copy`: null, or the weights in bf16.
template <class T, class G>
void AdamWRange(const Factors<T>& f, T* weight, const G* grad, T* m, T* v, uint16_t* copy, size_t n) {
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
  const auto store_copy = [&](auto w, uint16_t* p) {
    if constexpr (sizeof(T) == sizeof(float)) bf16::HWY_NAMESPACE::store(d, w, p);
  };
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    auto mi = hn::LoadU(d, m + i), vi = hn::LoadU(d, v + i);
    const auto w = update(hn::LoadU(d, weight + i), load(d, grad + i), mi, vi);
    if (copy) store_copy(w, copy + i);
    hn::StoreU(w, d, weight + i);
    hn::StoreU(mi, d, m + i);
    hn::StoreU(vi, d, v + i);
  }
  if (i == n) return;
  // The rest goes through padded scratch, so that an element's result does not depend on its position.
  constexpr size_t kMost = HWY_MAX_BYTES / sizeof(T);
  HWY_ALIGN T scratch[3][kMost] = {};
  HWY_ALIGN G scratch_grad[kMost] = {};
  HWY_ALIGN uint16_t scratch_copy[kMost] = {};
  const size_t bytes = (n - i) * sizeof(T);
  T* const targets[3] = {weight + i, m + i, v + i};
  for (int k = 0; k < 3; ++k) std::memcpy(scratch[k], targets[k], bytes);
  std::memcpy(scratch_grad, grad + i, (n - i) * sizeof(G));
  auto mi = hn::Load(d, scratch[1]), vi = hn::Load(d, scratch[2]);
  const auto w = update(hn::Load(d, scratch[0]), load(d, scratch_grad), mi, vi);
  hn::Store(w, d, scratch[0]);
  hn::Store(mi, d, scratch[1]);
  hn::Store(vi, d, scratch[2]);
  store_copy(w, scratch_copy);
  for (int k = 0; k < 3; ++k) std::memcpy(targets[k], scratch[k], bytes);
  if (copy) std::memcpy(copy + i, scratch_copy, (n - i) * sizeof(uint16_t));
}

void AdamWFloat(const Factors<float>& f, float* w, const float* g, float* m, float* v, uint16_t* copy, size_t n) {
  AdamWRange(f, w, g, m, v, copy, n);
}
void AdamWBf16(const Factors<float>& f, float* w, const uint16_t* g, float* m, float* v, uint16_t* copy, size_t n) {
  AdamWRange(f, w, g, m, v, copy, n);
}
void AdamWDouble(const Factors<double>& f, double* w, const double* g, double* m, double* v, size_t n) {
  AdamWRange(f, w, g, m, v, nullptr, n);
}

}  // namespace weft::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::optim {

HWY_EXPORT(AdamWFloat);
HWY_EXPORT(AdamWBf16);
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

uint16_t* bits_of(const at::Tensor& t, int64_t offset) {
  return reinterpret_cast<uint16_t*>(t.mutable_data_ptr<at::BFloat16>()) + offset;
}

/// One flat piece of an update, [begin, begin + n) of every tensor.
struct Piece {
  int64_t begin, n;
  at::Tensor of(const at::Tensor& t) const { return t.narrow(0, begin, n); }
  template <class T>
  T* at(const at::Tensor& t) const {
    return t.mutable_data_ptr<T>() + begin;
  }
};

void update_double(const Factors<double>& f, const Piece& piece, const at::Tensor& w, const at::Tensor& g, const at::Tensor& m,
                   const at::Tensor& v) {
  const at::Tensor grad = piece.of(g).to(at::kDouble);  // the tensor itself if it is fp64 already
  HWY_DYNAMIC_DISPATCH(AdamWDouble)
  (f, piece.at<double>(w), grad.const_data_ptr<double>(), piece.at<double>(m), piece.at<double>(v), static_cast<size_t>(piece.n));
}

/// `weight` [n] fp32; `copy` null or bf16.
void update_float(const Factors<float>& f, const Piece& piece, float* weight, const at::Tensor& g, const at::Tensor& m,
                  const at::Tensor& v, uint16_t* copy) {
  float* mi = piece.at<float>(m);
  float* vi = piece.at<float>(v);
  const auto n = static_cast<size_t>(piece.n);
  if (g.scalar_type() == at::kBFloat16) {
    return HWY_DYNAMIC_DISPATCH(AdamWBf16)(f, weight, bits_of(g, piece.begin), mi, vi, copy, n);
  }
  const at::Tensor grad = piece.of(g).to(at::kFloat);  // fp16 is widened piece by piece
  HWY_DYNAMIC_DISPATCH(AdamWFloat)(f, weight, grad.const_data_ptr<float>(), mi, vi, copy, n);
}

template <class Fn>
void for_pieces(int64_t numel, const Fn& fn) {
  at::parallel_for(0, numel, kGrain, [&](int64_t begin, int64_t end) {
    const at::NoGradGuard no_grad;
    for (int64_t i = begin; i < end; i += kGrain) fn(Piece{i, std::min(kGrain, end - i)});
  });
}

}  // namespace

void adamw_update(const AdamWStep& step, const at::Tensor& weight, const at::Tensor& grad, const at::Tensor& exp_avg,
                  const at::Tensor& exp_avg_sq, const at::Tensor& copy) {
  const at::Tensor w = weight.view(-1), g = grad.view(-1), m = exp_avg.view(-1), v = exp_avg_sq.view(-1);
  const at::Tensor c = copy.defined() ? copy.view(-1) : copy;
  if (weight.is_meta()) return;  // shapes only: there is nothing to compute
  const bool wide = weight.scalar_type() == at::kDouble;
  const bool bf16_copy = c.defined() && c.scalar_type() == at::kBFloat16 && !wide;
  for_pieces(w.numel(), [&](const Piece& piece) {
    if (wide) {
      update_double(factors_of<double>(step), piece, w, g, m, v);
    } else {
      uint16_t* target = bf16_copy ? bits_of(c, piece.begin) : nullptr;
      update_float(factors_of<float>(step), piece, piece.at<float>(w), g, m, v, target);
    }
    if (c.defined() && !bf16_copy) piece.of(c).copy_(piece.of(w));
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
  const at::Tensor w = weight.view(-1), g = grad.view(-1), m = exp_avg.view(-1), v = exp_avg_sq.view(-1);
  if (weight.is_meta()) return;
  for_pieces(w.numel(), [&](const Piece& piece) {
    const at::Tensor wide = piece.of(w).to(at::kFloat);
    update_float(factors_of<float>(step), piece, wide.mutable_data_ptr<float>(), g, m, v, nullptr);
    round_stochastically(wide.const_data_ptr<float>(), bits_of(w, piece.begin), piece.n, rounding.seed + static_cast<uint64_t>(step.step),
                         rounding.stream, static_cast<uint64_t>(rounding.first + piece.begin));
  });
}

}  // namespace weft::optim
#endif
