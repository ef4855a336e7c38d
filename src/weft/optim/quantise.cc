// 8-bit moments: the codes, and AdamW on blocks of them.
#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "weft/optim/factors.h"
#include "weft/optim/pieces.h"

namespace weft::optim {
namespace {

/// The dynamic tree's 256 values in [-1, 1] or [0, 1], ascending (Dettmers 2016; 2022, section 1.3): seven decades 10^-6 .. 1; in
/// the i-th of them 2^i values (without sign 2^(i+1)), the middles of equal parts of [0.1, 1]; besides 0 and 1.
std::array<double, 256> dynamic_tree(bool with_sign) {
  constexpr int kDecades = 7;
  std::array<double, 256> values{};
  size_t count = 0;
  for (int i = 0; i < kDecades; ++i) {
    const int parts = 1 << (with_sign ? i : i + 1);
    for (int k = 0; k < parts; ++k) {
      const double value = std::pow(10.0, i + 1 - kDecades) * (0.1 + 0.9 * (k + 0.5) / parts);
      values[count++] = value;
      if (with_sign) values[count++] = -value;
    }
  }
  values[count++] = 0;
  values[count++] = 1;
  std::ranges::sort(values);
  return values;
}

/// Finds the nearest code: a table by sign, exponent and leading digits gives one that is near, a few comparisons the right one.
template <class T>
class Codebook {
 public:
  explicit Codebook(bool with_sign) {
    const std::array<double, 256> tree = dynamic_tree(with_sign);
    for (size_t i = 0; i < tree.size(); ++i) values_[i] = static_cast<T>(tree[i]);
    for (size_t i = 0; i + 1 < tree.size(); ++i) middles_[i] = static_cast<T>((tree[i] + tree[i + 1]) / 2);
    for (uint32_t key = 0; key < near_.size(); ++key) {
      const auto x = std::bit_cast<float>(key << kShift | 1U << (kShift - 1));
      near_[key] = std::isfinite(x) ? static_cast<uint8_t>(std::ranges::lower_bound(middles_, static_cast<T>(x)) - middles_.begin()) : 0;
    }
  }
  T value(uint8_t code) const { return values_[code]; }
  /// Of x in [-1, 1]; between two values the lower one where they are equally near.
  uint8_t code(T x) const {
    int code = near_[std::bit_cast<uint32_t>(static_cast<float>(x)) >> kShift];
    while (code < kLast && x > middles_[static_cast<size_t>(code)]) ++code;
    while (code > 0 && x <= middles_[static_cast<size_t>(code - 1)]) --code;
    return static_cast<uint8_t>(code);
  }

 private:
  static constexpr int kShift = 18, kLast = 255;
  std::array<T, 256> values_{};
  std::array<T, 255> middles_{};
  std::array<uint8_t, 1 << (32 - kShift)> near_{};
};

template <class T>
void unpack(const Codebook<T>& book, const uint8_t* codes, T scale, T* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = book.value(codes[i]) * scale;
}

/// Packs a block and returns its scale. least: code of the smallest value that is kept of numbers above zero.
template <class T>
T pack(const Codebook<T>& book, const T* in, uint8_t* codes, int64_t n, uint8_t least) {
  T scale = 0;
  for (int64_t i = 0; i < n; ++i) scale = std::max(scale, std::abs(in[i]));
  const T divisor = scale > 0 ? scale : T{1};
  for (int64_t i = 0; i < n; ++i) {
    const uint8_t code = book.code(in[i] / divisor);
    codes[i] = in[i] > 0 ? std::max(code, least) : code;
  }
  return scale;
}

struct Moments {
  const QuantMoment& first;
  const QuantMoment& second;
};

template <class T>
void update_piece(const AdamWFactors<T>& f, const Piece& piece, T* weight, const T* grad, const Moments& moments, uint16_t* copy) {
  static const Codebook<T> with_sign(true), without_sign(false);
  alignas(64) std::array<T, kQuantBlock> m, v;
  for (int64_t i = 0; i < piece.n; i += kQuantBlock) {
    const int64_t n = std::min(kQuantBlock, piece.n - i), at = piece.begin + i;
    uint8_t* m_codes = moments.first.codes.template mutable_data_ptr<uint8_t>() + at;
    uint8_t* v_codes = moments.second.codes.template mutable_data_ptr<uint8_t>() + at;
    T& m_scale = moments.first.scales.template mutable_data_ptr<T>()[at / kQuantBlock];
    T& v_scale = moments.second.scales.template mutable_data_ptr<T>()[at / kQuantBlock];
    unpack(with_sign, m_codes, m_scale, m.data(), n);
    unpack(without_sign, v_codes, v_scale, v.data(), n);
    adamw_range(f, weight + i, grad + i, m.data(), v.data(), copy != nullptr ? copy + i : nullptr, n);
    m_scale = pack(with_sign, m.data(), m_codes, n, 0);
    v_scale = pack(without_sign, v.data(), v_codes, n, 1);
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
