#include "weft/nn/simd.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "weft/nn/simd.cc"
#include <hwy/foreach_target.h>  // compiles the rest of this file once per instruction set
#include <hwy/highway.h>
#include <hwy/contrib/math/math-inl.h>

#include "weft/core/bf16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::nn::simd::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class C>
HWY_INLINE auto load_full(hn::ScalableTag<C> d, const C* p) {
  return hn::LoadU(d, p);
}
HWY_INLINE auto load_full(hn::ScalableTag<float> d, const Bf16Bits* p) { return bf16::HWY_NAMESPACE::load(d, p); }
template <class C, class V>
HWY_INLINE void store_full(hn::ScalableTag<C> d, V v, C* p) {
  hn::StoreU(v, d, p);
}
template <class V>
HWY_INLINE void store_full(hn::ScalableTag<float> d, V v, Bf16Bits* p) { bf16::HWY_NAMESPACE::store(d, v, p); }

/// The first `count` elements, zeros behind them, and their counterpart: no element's result depends on its position.
template <class T, class D>
HWY_INLINE auto load(D d, const T* p, size_t count) {
  if (count >= hn::Lanes(d)) return load_full(d, p);
  T padded[HWY_MAX_BYTES / sizeof(float)] = {};
  std::memcpy(padded, p, count * sizeof(T));
  return load_full(d, padded);
}
template <class T, class D, class V>
HWY_INLINE void store(D d, V v, T* p, size_t count) {
  if (count >= hn::Lanes(d)) return store_full(d, v, p);
  T padded[HWY_MAX_BYTES / sizeof(float)];
  store_full(d, v, padded);
  std::memcpy(p, padded, count * sizeof(T));
}

template <class D, class V>
HWY_INLINE auto sum_lanes(D d, V v) {
  return hn::GetLane(hn::SumOfLanes(d, v));
}

template <class T>
void RmsNormForward(const T* x, const T* weight, double eps, T* y, Computed<T>* rstd, int64_t rows, int64_t n) {
  using C = Computed<T>;
  const hn::ScalableTag<C> d;
  const size_t size = static_cast<size_t>(n), lanes = hn::Lanes(d);
  for (int64_t row = 0; row < rows; ++row, x += n, y += n) {
    auto squares = hn::Zero(d);
    for (size_t i = 0; i < size; i += lanes) {
      const auto v = load(d, x + i, size - i);
      squares = hn::MulAdd(v, v, squares);
    }
    const C r = static_cast<C>(1) / std::sqrt(sum_lanes(d, squares) / static_cast<C>(n) + static_cast<C>(eps));
    rstd[row] = r;
    const auto scale = hn::Set(d, r);
    for (size_t i = 0; i < size; i += lanes)
      store(d, hn::Mul(hn::Mul(load(d, x + i, size - i), scale), load(d, weight + i, size - i)), y + i, size - i);
  }
}

// With h = x rstd and g = dy weight: dx = rstd (g - h mean(g h)), dweight = sum over rows of dy h.
template <class T>
void RmsNormBackward(const T* dy, const T* x, const T* weight, const Computed<T>* rstd, T* dx, Computed<T>* dweight,
                     int64_t rows, int64_t n) {
  using C = Computed<T>;
  const hn::ScalableTag<C> d;
  const size_t size = static_cast<size_t>(n), lanes = hn::Lanes(d);
  for (int64_t row = 0; row < rows; ++row, x += n, dy += n, dx += n) {
    const auto r = hn::Set(d, rstd[row]);
    auto products = hn::Zero(d);
    for (size_t i = 0; i < size; i += lanes) {
      const auto h = hn::Mul(load(d, x + i, size - i), r), g = load(d, dy + i, size - i);
      products = hn::MulAdd(hn::Mul(g, load(d, weight + i, size - i)), h, products);
      store(d, hn::MulAdd(g, h, load(d, dweight + i, size - i)), dweight + i, size - i);
    }
    const auto mean = hn::Set(d, sum_lanes(d, products) / static_cast<C>(n));
    for (size_t i = 0; i < size; i += lanes) {
      const auto h = hn::Mul(load(d, x + i, size - i), r);
      const auto g = hn::Mul(load(d, dy + i, size - i), load(d, weight + i, size - i));
      store(d, hn::Mul(r, hn::NegMulAdd(h, mean, g)), dx + i, size - i);
    }
  }
}

template <class D, class V>
HWY_INLINE V sigmoid(D d, V x) {
  const auto one = hn::Set(d, 1);
  return hn::Div(one, hn::Add(one, hn::Exp(d, hn::Neg(x))));
}

template <class T>
void SwigluForward(const T* gate, const T* up, T* y, int64_t n) {
  const hn::ScalableTag<Computed<T>> d;
  const size_t size = static_cast<size_t>(n), lanes = hn::Lanes(d);
  for (size_t i = 0; i < size; i += lanes) {
    const auto g = load(d, gate + i, size - i);
    store(d, hn::Mul(hn::Mul(g, sigmoid(d, g)), load(d, up + i, size - i)), y + i, size - i);
  }
}

template <class T>
void SwigluBackward(const T* dy, const T* gate, const T* up, T* dgate, T* dup, int64_t n) {
  const hn::ScalableTag<Computed<T>> d;
  const size_t size = static_cast<size_t>(n), lanes = hn::Lanes(d);
  const auto one = hn::Set(d, 1);
  for (size_t i = 0; i < size; i += lanes) {
    const auto g = load(d, gate + i, size - i), grad = load(d, dy + i, size - i), s = sigmoid(d, g);
    const auto slope = hn::Mul(s, hn::MulAdd(g, hn::Sub(one, s), one));  // silu'(g)
    store(d, hn::Mul(hn::Mul(grad, load(d, up + i, size - i)), slope), dgate + i, size - i);
    store(d, hn::Mul(hn::Mul(grad, g), s), dup + i, size - i);
  }
}

template <class T>
void RopeToken(const T* x, const Computed<T>* cos, const Computed<T>* sin, T* y, int64_t heads, int64_t head_dim,
               int64_t rotated, int direction) {
  using C = Computed<T>;
  const hn::ScalableTag<C> d;
  const size_t half = static_cast<size_t>(rotated / 2), lanes = hn::Lanes(d);
  const auto sign = hn::Set(d, static_cast<C>(direction));
  for (int64_t head = 0; head < heads; ++head, x += head_dim, y += head_dim) {
    for (size_t i = 0; i < half; i += lanes) {
      const auto c = load(d, cos + i, half - i), s = hn::Mul(sign, load(d, sin + i, half - i));
      const auto a = load(d, x + i, half - i), b = load(d, x + half + i, half - i);
      store(d, hn::NegMulAdd(b, s, hn::Mul(a, c)), y + i, half - i);
      store(d, hn::MulAdd(a, s, hn::Mul(b, c)), y + half + i, half - i);
    }
    if (rotated < head_dim) std::memcpy(y + rotated, x + rotated, static_cast<size_t>(head_dim - rotated) * sizeof(T));
  }
}

template <class T>
double CrossEntropyRow(T* logits, int64_t n, int64_t target, bool gradient, Computed<T>* scratch) {
  using C = Computed<T>;
  const hn::ScalableTag<C> d;
  const size_t size = static_cast<size_t>(n), lanes = hn::Lanes(d);
  const size_t whole = size - size % lanes;
  auto highest = hn::Set(d, static_cast<C>(-INFINITY));
  for (size_t i = 0; i < whole; i += lanes) highest = hn::Max(highest, load_full(d, logits + i));
  C largest = hn::GetLane(hn::MaxOfLanes(d, highest));
  for (size_t i = whole; i < size; ++i) {
    HWY_ALIGN C one[HWY_MAX_BYTES / sizeof(C)];
    hn::Store(load(d, logits + i, 1), d, one);
    largest = std::max(largest, one[0]);
  }
  C* exponentials = nullptr;  // exp(logit - largest); 16-bit logits are too coarse to hold them
  if constexpr (std::is_same_v<T, C>) exponentials = gradient ? logits : scratch;
  else exponentials = scratch;
  HWY_ALIGN C at_target[HWY_MAX_BYTES / sizeof(C)];
  hn::Store(load(d, logits + target, 1), d, at_target);
  const auto offset = hn::Set(d, largest);
  auto total = hn::Zero(d);
  for (size_t i = 0; i < whole; i += lanes) {
    const auto e = hn::Exp(d, hn::Sub(load_full(d, logits + i), offset));
    total = hn::Add(total, e);
    if (gradient) hn::StoreU(e, d, exponentials + i);
  }
  C sum = sum_lanes(d, total);
  if (whole < size) {
    const auto e = hn::Exp(d, hn::Sub(load(d, logits + whole, size - whole), offset));
    HWY_ALIGN C rest[HWY_MAX_BYTES / sizeof(C)];
    hn::Store(e, d, rest);
    for (size_t i = whole; i < size; ++i) sum += rest[i - whole];
    if (gradient) store(d, e, exponentials + whole, size - whole);
  }
  if (gradient) {
    const auto inverse = hn::Set(d, static_cast<C>(1) / sum);
    exponentials[target] -= sum;
    for (size_t i = 0; i < size; i += lanes) store(d, hn::Mul(load(d, exponentials + i, size - i), inverse), logits + i, size - i);
  }
  return std::log(static_cast<double>(sum)) + (static_cast<double>(largest) - static_cast<double>(at_target[0]));
}

template <class T>
RowShare SoftmaxBegin(T* logits, int64_t n, int64_t target, bool gradient) {
  using C = Computed<T>;
  const hn::ScalableTag<C> d;
  const size_t size = static_cast<size_t>(n), lanes = hn::Lanes(d), whole = size - size % lanes;
  auto highest = hn::Set(d, static_cast<C>(-INFINITY));
  for (size_t i = 0; i < whole; i += lanes) highest = hn::Max(highest, load_full(d, logits + i));
  C largest = hn::GetLane(hn::MaxOfLanes(d, highest));
  HWY_ALIGN C rest[HWY_MAX_BYTES / sizeof(C)];
  if (whole < size) {
    hn::Store(load(d, logits + whole, size - whole), d, rest);
    for (size_t i = whole; i < size; ++i) largest = std::max(largest, rest[i - whole]);
  }
  HWY_ALIGN C at_target[HWY_MAX_BYTES / sizeof(C)] = {};
  if (target >= 0) hn::Store(load(d, logits + target, 1), d, at_target);
  constexpr bool keeps = std::is_same_v<T, C>;  // 16-bit elements are too coarse to hold exponentials
  const auto offset = hn::Set(d, largest);
  auto total = hn::Zero(d);
  for (size_t i = 0; i < whole; i += lanes) {
    const auto e = hn::Exp(d, hn::Sub(load_full(d, logits + i), offset));
    total = hn::Add(total, e);
    if constexpr (keeps) {
      if (gradient) hn::StoreU(e, d, logits + i);
    }
  }
  C sum = sum_lanes(d, total);
  if (whole < size) {
    const auto e = hn::Exp(d, hn::Sub(load(d, logits + whole, size - whole), offset));
    hn::Store(e, d, rest);
    for (size_t i = whole; i < size; ++i) sum += rest[i - whole];
    if constexpr (keeps) {
      if (gradient) store(d, e, logits + whole, size - whole);
    }
  }
  return {static_cast<double>(largest), static_cast<double>(sum), static_cast<double>(at_target[0])};
}

template <class T>
void SoftmaxEnd(T* row, int64_t n, double largest, double log_total, int64_t target) {
  using C = Computed<T>;
  const hn::ScalableTag<C> d;
  const size_t size = static_cast<size_t>(n), lanes = hn::Lanes(d);
  if constexpr (std::is_same_v<T, C>) {
    const auto factor = hn::Set(d, static_cast<C>(std::exp(largest - log_total)));
    for (size_t i = 0; i < size; i += lanes) store(d, hn::Mul(load(d, row + i, size - i), factor), row + i, size - i);
    if (target >= 0) row[target] -= C{1};
  } else {
    HWY_ALIGN C one[HWY_MAX_BYTES / sizeof(C)] = {};
    if (target >= 0) hn::Store(load(d, row + target, 1), d, one);
    const double less_one = std::exp(static_cast<double>(one[0]) - log_total) - 1.0;  // from the rounded softmax it would round twice
    const auto offset = hn::Set(d, static_cast<C>(log_total));
    for (size_t i = 0; i < size; i += lanes) store(d, hn::Exp(d, hn::Sub(load(d, row + i, size - i), offset)), row + i, size - i);
    if (target >= 0) store(d, hn::Set(d, static_cast<C>(less_one)), row + target, 1);
  }
}

// One name per type, which HWY_EXPORT needs.
#define WEFT_NN_INSTANCES(T, S)                                                                                              \
  void RmsNormForward##S(const T* x, const T* w, double eps, T* y, Computed<T>* r, int64_t rows, int64_t n) {                 \
    RmsNormForward<T>(x, w, eps, y, r, rows, n);                                                                             \
  }                                                                                                                          \
  void RmsNormBackward##S(const T* dy, const T* x, const T* w, const Computed<T>* r, T* dx, Computed<T>* dw, int64_t rows,    \
                          int64_t n) {                                                                                       \
    RmsNormBackward<T>(dy, x, w, r, dx, dw, rows, n);                                                                        \
  }                                                                                                                          \
  void SwigluForward##S(const T* g, const T* u, T* y, int64_t n) { SwigluForward<T>(g, u, y, n); }                            \
  void SwigluBackward##S(const T* dy, const T* g, const T* u, T* dg, T* du, int64_t n) {                                      \
    SwigluBackward<T>(dy, g, u, dg, du, n);                                                                                  \
  }                                                                                                                          \
  void RopeToken##S(const T* x, const Computed<T>* c, const Computed<T>* s, T* y, int64_t heads, int64_t hd, int64_t rotated, \
                    int direction) {                                                                                         \
    RopeToken<T>(x, c, s, y, heads, hd, rotated, direction);                                                                 \
  }                                                                                                                          \
  double CrossEntropyRow##S(T* logits, int64_t n, int64_t target, bool gradient, Computed<T>* scratch) {                      \
    return CrossEntropyRow<T>(logits, n, target, gradient, scratch);                                                         \
  }                                                                                                                          \
  RowShare SoftmaxBegin##S(T* logits, int64_t n, int64_t target, bool gradient) {                                            \
    return SoftmaxBegin<T>(logits, n, target, gradient);                                                                     \
  }                                                                                                                          \
  void SoftmaxEnd##S(T* row, int64_t n, double largest, double log_total, int64_t target) {                                  \
    SoftmaxEnd<T>(row, n, largest, log_total, target);                                                                       \
  }
WEFT_NN_INSTANCES(float, F32)
WEFT_NN_INSTANCES(double, F64)
WEFT_NN_INSTANCES(Bf16Bits, Bf16)
#undef WEFT_NN_INSTANCES

}  // namespace weft::nn::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::nn::simd {

#define WEFT_NN_EXPORT(T, S)                                                                                                 \
  HWY_EXPORT(RmsNormForward##S);                                                                                             \
  HWY_EXPORT(RmsNormBackward##S);                                                                                            \
  HWY_EXPORT(SwigluForward##S);                                                                                              \
  HWY_EXPORT(SwigluBackward##S);                                                                                             \
  HWY_EXPORT(RopeToken##S);                                                                                                  \
  HWY_EXPORT(CrossEntropyRow##S);                                                                                            \
  HWY_EXPORT(SoftmaxBegin##S);                                                                                               \
  HWY_EXPORT(SoftmaxEnd##S);                                                                                                 \
  template <>                                                                                                                \
  void rms_norm_forward<T>(const T* x, const T* w, double eps, T* y, Computed<T>* r, int64_t rows, int64_t n) {               \
    HWY_DYNAMIC_DISPATCH(RmsNormForward##S)(x, w, eps, y, r, rows, n);                                                       \
  }                                                                                                                          \
  template <>                                                                                                                \
  void rms_norm_backward<T>(const T* dy, const T* x, const T* w, const Computed<T>* r, T* dx, Computed<T>* dw, int64_t rows,  \
                            int64_t n) {                                                                                     \
    HWY_DYNAMIC_DISPATCH(RmsNormBackward##S)(dy, x, w, r, dx, dw, rows, n);                                                  \
  }                                                                                                                          \
  template <>                                                                                                                \
  void swiglu_forward<T>(const T* g, const T* u, T* y, int64_t n) {                                                          \
    HWY_DYNAMIC_DISPATCH(SwigluForward##S)(g, u, y, n);                                                                      \
  }                                                                                                                          \
  template <>                                                                                                                \
  void swiglu_backward<T>(const T* dy, const T* g, const T* u, T* dg, T* du, int64_t n) {                                     \
    HWY_DYNAMIC_DISPATCH(SwigluBackward##S)(dy, g, u, dg, du, n);                                                            \
  }                                                                                                                          \
  template <>                                                                                                                \
  void rope_token<T>(const T* x, const Computed<T>* c, const Computed<T>* s, T* y, int64_t heads, int64_t hd,                 \
                     int64_t rotated, int direction) {                                                                       \
    HWY_DYNAMIC_DISPATCH(RopeToken##S)(x, c, s, y, heads, hd, rotated, direction);                                           \
  }                                                                                                                          \
  template <>                                                                                                                \
  double cross_entropy_row<T>(T* logits, int64_t n, int64_t target, bool gradient, Computed<T>* scratch) {                    \
    return HWY_DYNAMIC_DISPATCH(CrossEntropyRow##S)(logits, n, target, gradient, scratch);                                   \
  }                                                                                                                          \
  template <>                                                                                                                \
  RowShare softmax_begin<T>(T* logits, int64_t n, int64_t target, bool gradient) {                                           \
    return HWY_DYNAMIC_DISPATCH(SoftmaxBegin##S)(logits, n, target, gradient);                                               \
  }                                                                                                                          \
  template <>                                                                                                                \
  void softmax_end<T>(T* row, int64_t n, double largest, double log_total, int64_t target) {                                 \
    HWY_DYNAMIC_DISPATCH(SoftmaxEnd##S)(row, n, largest, log_total, target);                                                 \
  }
WEFT_NN_EXPORT(float, F32)
WEFT_NN_EXPORT(double, F64)
WEFT_NN_EXPORT(Bf16Bits, Bf16)
#undef WEFT_NN_EXPORT

}  // namespace weft::nn::simd
#endif
