// 8-bit moments: the codes, and AdamW on blocks of them.
#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "weft/optim/quantise.cc"
#include <hwy/foreach_target.h>
// foreach_target includes this file once per instruction set; highway.h must follow it.
#include <hwy/highway.h>

#include "weft/optim/codebook.h"
#include "weft/optim/factors.h"
#include "weft/optim/pieces.h"

HWY_BEFORE_NAMESPACE();
namespace weft::optim::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// All three on a whole block, of which the caller uses what it needs.
void Unpack(const FastCodebook& book, const uint8_t* codes, float scale, float* out) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Rebind<uint8_t, decltype(d)> d8;
  const auto factor = hn::Set(d, scale);
  for (size_t i = 0; i < kQuantBlock; i += hn::Lanes(d)) {
    const auto code = hn::PromoteTo(di, hn::LoadU(d8, codes + i));
    hn::StoreU(hn::Mul(hn::GatherIndex(d, book.values.data(), code), factor), d, out + i);
  }
}

/// The largest magnitude; NaN counts as none.
float Largest(const float* in) {
  const hn::ScalableTag<float> d;
  auto largest = hn::Zero(d);
  for (size_t i = 0; i < kQuantBlock; i += hn::Lanes(d)) {
    const auto size = hn::Abs(hn::LoadU(d, in + i));
    largest = hn::IfThenElse(hn::Gt(size, largest), size, largest);
  }
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

/// The codes of in / divisor. least: code of the smallest value that is kept of numbers above zero.
void Pack(const FastCodebook& book, const float* in, float divisor, uint8_t* codes, uint8_t least) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Rebind<uint8_t, decltype(d)> d8;
  const auto by = hn::Set(d, divisor);
  const auto low_bits = hn::Set(di, FastCodebook::kLowBits), one = hn::Set(di, 1), lowest = hn::Set(di, least);
  const auto first = hn::Set(di, FastCodebook::kFirstKey), last = hn::Set(di, FastCodebook::kKeys - 1), negative = hn::Set(di, FastCodebook::kKeys);
  for (size_t i = 0; i < kQuantBlock; i += hn::Lanes(d)) {
    const auto value = hn::LoadU(d, in + i), x = hn::Div(value, by);
    const auto bits = hn::BitCast(di, x), sign = hn::ShiftRight<31>(bits);  // 0 or -1
    const auto magnitude = hn::BitCast(di, hn::Abs(x));
    const auto key = hn::Min(hn::Max(hn::Sub(hn::ShiftRight<FastCodebook::kShift>(magnitude), first), hn::Zero(di)), last);
    const auto entry = hn::GatherIndex(di, book.entries.data(), hn::Add(key, hn::And(sign, negative)));
    const auto beyond = hn::Gt(hn::And(magnitude, low_bits), hn::And(entry, low_bits));
    auto code = hn::Add(hn::ShiftRight<FastCodebook::kShift>(entry), hn::IfThenElseZero(beyond, hn::Or(sign, one)));
    code = hn::IfThenZeroElse(hn::RebindMask(di, hn::IsNaN(x)), code);
    code = hn::IfThenElse(hn::RebindMask(di, hn::Gt(value, hn::Zero(d))), hn::Max(code, lowest), code);
    hn::StoreU(hn::DemoteTo(d8, code), d8, codes + i);
  }
}

}  // namespace weft::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::optim {

HWY_EXPORT(Unpack);
HWY_EXPORT(Largest);
HWY_EXPORT(Pack);

namespace {

void unpack(const FastCodebook& book, const uint8_t* codes, float scale, float* out) { HWY_DYNAMIC_DISPATCH(Unpack)(book, codes, scale, out); }
void unpack(const Codebook<double>& book, const uint8_t* codes, double scale, double* out) {
  for (int64_t i = 0; i < kQuantBlock; ++i) out[i] = book.value(codes[i]) * scale;
}

/// Packs a block and returns its scale.
float pack(const FastCodebook& book, const float* in, uint8_t* codes, uint8_t least) {
  const float scale = HWY_DYNAMIC_DISPATCH(Largest)(in);
  HWY_DYNAMIC_DISPATCH(Pack)(book, in, scale > 0 ? scale : 1, codes, least);
  return scale;
}
double pack(const Codebook<double>& book, const double* in, uint8_t* codes, uint8_t least) {
  double scale = 0;
  for (int64_t i = 0; i < kQuantBlock; ++i) scale = std::max(scale, std::abs(in[i]));
  const double divisor = scale > 0 ? scale : 1;
  for (int64_t i = 0; i < kQuantBlock; ++i) {
    const uint8_t code = book.code(in[i] / divisor);
    codes[i] = in[i] > 0 ? std::max(code, least) : code;
  }
  return scale;
}

template <class T>
const auto& book_of(bool with_sign) {
  using Book = std::conditional_t<std::is_same_v<T, float>, FastCodebook, Codebook<double>>;
  static const Book signed_book{Codebook<T>(true)}, unsigned_book{Codebook<T>(false)};
  return with_sign ? signed_book : unsigned_book;
}

/// A moment of one block while it is updated, in `values`; beyond its end zeros.
template <class T>
class Block {
 public:
  Block(const QuantMoment& moment, bool with_sign, int64_t begin, int64_t n)
      : book_(book_of<T>(with_sign)),
        codes_(moment.codes.mutable_data_ptr<uint8_t>() + begin),
        scale_(moment.scales.mutable_data_ptr<T>()[begin / kQuantBlock]),
        n_(static_cast<size_t>(n)),
        least_(with_sign ? 0 : 1) {
    std::memcpy(bytes_.data(), codes_, n_);
    unpack(book_, bytes_.data(), scale_, values.data());
    std::fill(values.begin() + n, values.end(), T{0});
  }
  void store() {
    scale_ = pack(book_, values.data(), bytes_.data(), least_);
    std::memcpy(codes_, bytes_.data(), n_);
  }

  alignas(64) std::array<T, kQuantBlock> values;

 private:
  decltype(book_of<T>(true)) book_;
  uint8_t* codes_;
  T& scale_;
  size_t n_;
  uint8_t least_;
  alignas(64) std::array<uint8_t, kQuantBlock> bytes_{};
};

struct Moments {
  const QuantMoment& first;
  const QuantMoment& second;
};

template <class T>
void update_piece(const AdamWFactors<T>& f, const Piece& piece, T* weight, const T* grad, const Moments& moments, uint16_t* copy) {
  for (int64_t i = 0; i < piece.n; i += kQuantBlock) {
    const int64_t n = std::min(kQuantBlock, piece.n - i);
    Block<T> m(moments.first, true, piece.begin + i, n), v(moments.second, false, piece.begin + i, n);
    adamw_range(f, weight + i, grad + i, m.values.data(), v.values.data(), copy != nullptr ? copy + i : nullptr, n);
    m.store();
    v.store();
  }
}

}  // namespace

void adam8bit_update(const AdamWStep& step, const at::Tensor& weight, const at::Tensor& grad, const QuantMoment& exp_avg,
                     const QuantMoment& exp_avg_sq, const at::Tensor& copy) {
  if (weight.is_meta()) return;
  const Copy rounded(copy, weight);
  const Moments moments{exp_avg, exp_avg_sq};
  const auto narrow = adamw_factors<float>(step);
  const auto wide = adamw_factors<double>(step);
  for_pieces(weight.numel(), [&](const Piece& piece) {
    const at::Tensor g = piece.of(grad).to(weight.scalar_type());
    if (weight.scalar_type() == at::kDouble) {
      update_piece(wide, piece, piece.at<double>(weight), g.const_data_ptr<double>(), moments, nullptr);
    } else {
      update_piece(narrow, piece, piece.at<float>(weight), g.const_data_ptr<float>(), moments, rounded.target(piece));
    }
    rounded.finish(piece);
  });
}

}  // namespace weft::optim
#endif
