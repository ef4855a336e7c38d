// Vectors of fp32 from and to bf16 in memory, for kernels compiled once per instruction set. Included after highway.h, and
// again for each set: hence the guard that toggles (Highway's convention for -inl.h files).
#if defined(WEFT_CORE_BF16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CORE_BF16_INL_H_
#undef WEFT_CORE_BF16_INL_H_
#else
#define WEFT_CORE_BF16_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace weft::bf16::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using Floats = hn::ScalableTag<float>;

/// A full vector from p, which need not be aligned: bf16 is the upper half of fp32.
HWY_INLINE hn::Vec<Floats> load(Floats d, const uint16_t* p) {
  const hn::RebindToUnsigned<Floats> d32;
  const hn::Rebind<uint16_t, Floats> d16;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, p))));
}

/// Rounds to nearest, ties to even (Highway's own conversion truncates); NaN stays NaN.
HWY_INLINE void store(Floats d, hn::Vec<Floats> v, uint16_t* p) {
  const hn::RebindToUnsigned<Floats> d32;
  const hn::Rebind<uint16_t, Floats> d16;
  const auto bits = hn::BitCast(d32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7FFF))));
  const auto quiet = hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(v)), hn::Set(d32, 0x7FC0), rounded);
  hn::StoreU(hn::TruncateTo(d16, quiet), d16, p);
}

}  // namespace weft::bf16::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
