#include "weft/comm/local/reduce.h"

#include <cstring>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "weft/comm/local/reduce.cc"
#include "hwy/foreach_target.h"  // compiles the rest of this file once per instruction set
#include "hwy/highway.h"

#include "weft/core/bf16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::local::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// --- storage formats: how a vector of accumulators is loaded from and stored to memory -------------------------------------

template <class T>
struct Plain {
  using Stored = T;
  using D = hn::ScalableTag<T>;
  static HWY_INLINE auto load(D d, const T* p) { return hn::LoadU(d, p); }
  template <class V>
  static HWY_INLINE void store(D d, V v, T* p) { hn::StoreU(v, d, p); }
};

struct Bf16 {
  using Stored = uint16_t;
  using D = hn::ScalableTag<float>;
  static HWY_INLINE auto load(D d, const uint16_t* p) { return bf16::HWY_NAMESPACE::load(d, p); }
  template <class V>
  static HWY_INLINE void store(D d, V v, uint16_t* p) { bf16::HWY_NAMESPACE::store(d, v, p); }
};

// fp16 by integer arithmetic on every instruction set: Highway's fallback for those without F16C truncates.
struct F16 {
  using Stored = uint16_t;
  using D = hn::ScalableTag<float>;
  static HWY_INLINE auto load(D d, const uint16_t* p) {
    const hn::RebindToUnsigned<D> du32;
    const hn::Rebind<uint16_t, D> du16;
    const auto half = hn::PromoteTo(du32, hn::LoadU(du16, p));
    const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(du32, 0x8000)));
    const auto magnitude = hn::ShiftLeft<13>(hn::And(half, hn::Set(du32, 0x7fff)));
    const auto exponent = hn::And(magnitude, hn::Set(du32, 0x7c00u << 13));
    const auto normal = hn::Add(magnitude, hn::Set(du32, 112u << 23));        // exponent bias 15 -> 127
    const auto infinite = hn::Add(normal, hn::Set(du32, 112u << 23));         // all ones -> all ones
    const auto scale = hn::BitCast(d, hn::Set(du32, 113u << 23));             // 2^-14
    const auto subnormal = hn::BitCast(
        du32, hn::Sub(hn::BitCast(d, hn::Add(normal, hn::Set(du32, 1u << 23))), scale));
    auto bits = hn::IfThenElse(hn::Eq(exponent, hn::Zero(du32)), subnormal, normal);
    bits = hn::IfThenElse(hn::Eq(exponent, hn::Set(du32, 0x7c00u << 13)), infinite, bits);
    return hn::BitCast(d, hn::Or(bits, sign));
  }
  template <class V>
  static HWY_INLINE void store(D d, V v, uint16_t* p) {
    const hn::RebindToUnsigned<D> du32;
    const hn::RebindToSigned<D> di32;
    const hn::Rebind<uint16_t, D> du16;
    const auto all = hn::BitCast(du32, v);
    const auto sign = hn::And(all, hn::Set(du32, 0x80000000u));
    const auto bits = hn::Xor(all, sign);
    const auto odd = hn::And(hn::ShiftRight<13>(bits), hn::Set(du32, 1));
    const auto normal = hn::ShiftRight<13>(
        hn::Add(hn::Add(bits, hn::Set(du32, (static_cast<uint32_t>(-112) << 23) + 0xfff)), odd));
    // Below 2^-14: adding 0.5 lets the adder round at the place of the last subnormal bit.
    const auto magic = hn::Set(du32, 126u << 23);
    const auto subnormal = hn::Sub(hn::BitCast(du32, hn::Add(hn::BitCast(d, bits), hn::BitCast(d, magic))), magic);
    const auto signed_bits = hn::BitCast(di32, bits);  // non-negative, so that signed comparison serves
    auto half = hn::IfThenElse(hn::RebindMask(du32, hn::Lt(signed_bits, hn::Set(di32, 113 << 23))), subnormal, normal);
    half = hn::IfThenElse(hn::RebindMask(du32, hn::Gt(signed_bits, hn::Set(di32, (143 << 23) - 1))),
                          hn::Set(du32, 0x7c00), half);
    half = hn::IfThenElse(hn::RebindMask(du32, hn::Gt(signed_bits, hn::Set(di32, 255 << 23))), hn::Set(du32, 0x7e00), half);
    half = hn::Or(half, hn::ShiftRight<16>(sign));
    hn::StoreU(hn::DemoteTo(du16, hn::BitCast(di32, half)), du16, p);
  }
};

// --- floating point --------------------------------------------------------------------------------------------------------

template <Reduce op, class V>
HWY_INLINE V combine(V a, V b) {
  if constexpr (op == Reduce::min || op == Reduce::max) {
    V best;
    if constexpr (op == Reduce::min) best = hn::Min(a, b);
    else best = hn::Max(a, b);
    return hn::IfThenElse(hn::IsNaN(a), a, hn::IfThenElse(hn::IsNaN(b), b, best));
  } else if constexpr (op == Reduce::product) {
    return hn::Mul(a, b);
  } else {
    return hn::Add(a, b);
  }
}

template <class Format, Reduce op>
void reduce_floats(void* out_bytes, const void* const* sources, int n, size_t count) {
  using T = typename Format::Stored;
  const typename Format::D d;
  const size_t lanes = hn::Lanes(d);
  const auto divisor = hn::Set(d, static_cast<hn::TFromD<typename Format::D>>(n));
  T* out = static_cast<T*>(out_bytes);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    auto sum = Format::load(d, static_cast<const T*>(sources[0]) + i);
    for (int s = 1; s < n; ++s) sum = combine<op>(sum, Format::load(d, static_cast<const T*>(sources[s]) + i));
    if constexpr (op == Reduce::avg) sum = hn::Div(sum, divisor);
    Format::store(d, sum, out + i);
  }
  if (i == count) return;
  // The rest through a full vector on the stack, so that it sees the same arithmetic.
  HWY_ALIGN T buffer[hn::MaxLanes(hn::ScalableTag<T>())] = {};
  const size_t rest = (count - i) * sizeof(T);
  std::memcpy(buffer, static_cast<const T*>(sources[0]) + i, rest);
  auto sum = Format::load(d, buffer);
  for (int s = 1; s < n; ++s) {
    std::memcpy(buffer, static_cast<const T*>(sources[s]) + i, rest);
    sum = combine<op>(sum, Format::load(d, buffer));
  }
  if constexpr (op == Reduce::avg) sum = hn::Div(sum, divisor);
  Format::store(d, sum, buffer);
  std::memcpy(out + i, buffer, rest);
}

// --- integers --------------------------------------------------------------------------------------------------------------

template <class T, Reduce op>
HWY_INLINE T combine_integers(T a, T b) {
  // In a type that wraps: unsigned, and at least as wide as unsigned int, since narrower ones are promoted to int.
  using U = std::conditional_t<(sizeof(T) < 4), uint32_t, std::make_unsigned_t<T>>;
  if constexpr (op == Reduce::min) return b < a ? b : a;
  else if constexpr (op == Reduce::max) return a < b ? b : a;
  else if constexpr (op == Reduce::product) return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
  else return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
}

template <class T, Reduce op>
void reduce_integers(void* out_bytes, const void* const* sources, int n, size_t count) {
  constexpr size_t kBlock = 256;  // elements; a constant trip count lets the compiler vectorise
  T* out = static_cast<T*>(out_bytes);
  for (size_t i = 0; i < count; i += kBlock) {
    const size_t length = count - i < kBlock ? count - i : kBlock;
    T total[kBlock] = {};
    T next[kBlock] = {};
    std::memcpy(total, static_cast<const T*>(sources[0]) + i, length * sizeof(T));
    for (int s = 1; s < n; ++s) {
      std::memcpy(next, static_cast<const T*>(sources[s]) + i, length * sizeof(T));
      for (size_t k = 0; k < kBlock; ++k) total[k] = combine_integers<T, op>(total[k], next[k]);
    }
    if constexpr (op == Reduce::avg) {
      for (size_t k = 0; k < length; ++k) total[k] = static_cast<T>(static_cast<int64_t>(total[k]) / n);
    }
    std::memcpy(out + i, total, length * sizeof(T));
  }
}

// --- choice of the kernel --------------------------------------------------------------------------------------------------

template <Reduce op>
void reduce_typed(void* out, const void* const* sources, int n, size_t count, Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return reduce_floats<Plain<float>, op>(out, sources, n, count);
    case Dtype::f64: return reduce_floats<Plain<double>, op>(out, sources, n, count);
    case Dtype::bf16: return reduce_floats<Bf16, op>(out, sources, n, count);
    case Dtype::f16: return reduce_floats<F16, op>(out, sources, n, count);
    case Dtype::i8: return reduce_integers<int8_t, op>(out, sources, n, count);
    case Dtype::boolean:  // 0 or 1: or is max, and is min
    case Dtype::u8: return reduce_integers<uint8_t, op>(out, sources, n, count);
    case Dtype::i16: return reduce_integers<int16_t, op>(out, sources, n, count);
    case Dtype::i32: return reduce_integers<int32_t, op>(out, sources, n, count);
    case Dtype::i64: return reduce_integers<int64_t, op>(out, sources, n, count);
    case Dtype::other: return;
  }
}

void reduce_any(void* out, const void* const* sources, int n, size_t count, Dtype dtype, Reduce op) {
  switch (op) {
    case Reduce::sum: return reduce_typed<Reduce::sum>(out, sources, n, count, dtype);
    case Reduce::avg: return reduce_typed<Reduce::avg>(out, sources, n, count, dtype);
    case Reduce::min: return reduce_typed<Reduce::min>(out, sources, n, count, dtype);
    case Reduce::max: return reduce_typed<Reduce::max>(out, sources, n, count, dtype);
    case Reduce::product: return reduce_typed<Reduce::product>(out, sources, n, count, dtype);
    case Reduce::none: return;
  }
}

}  // namespace weft::local::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::local {

HWY_EXPORT(reduce_any);

bool can_reduce(Dtype dtype, Reduce op) {
  if (dtype == Dtype::other || op == Reduce::none) return false;
  return !(dtype == Dtype::boolean && op == Reduce::avg);
}

void reduce(void* out, const void* const* sources, int n, size_t count, Dtype dtype, Reduce op) {
  if (dtype == Dtype::boolean && op == Reduce::sum) op = Reduce::max;
  if (dtype == Dtype::boolean && op == Reduce::product) op = Reduce::min;
  HWY_DYNAMIC_DISPATCH(reduce_any)(out, sources, n, count, dtype, op);
}

}  // namespace weft::local
#endif
