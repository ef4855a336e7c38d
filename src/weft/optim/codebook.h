// The 256 values of 8-bit moments, and two ways to find the nearest.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

namespace weft::optim {

/// The dynamic tree's 256 values in [-1, 1] or [0, 1], ascending (Dettmers 2016; 2022, section 1.3): seven decades 10^-6 .. 1; in
/// the i-th of them 2^i values (without sign 2^(i+1)), the middles of equal parts of [0.1, 1]; besides 0 and 1.
inline std::array<double, 256> dynamic_tree(bool with_sign) {
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

template <class T>
class Codebook {
 public:
  explicit Codebook(bool with_sign) {
    const std::array<double, 256> tree = dynamic_tree(with_sign);
    for (size_t i = 0; i < tree.size(); ++i) values_[i] = static_cast<T>(tree[i]);
    for (size_t i = 0; i + 1 < tree.size(); ++i) middles_[i] = static_cast<T>((tree[i] + tree[i + 1]) / 2);
  }
  T value(uint8_t code) const { return values_[code]; }
  /// Between this code's value and the next one's.
  T middle(uint8_t code) const { return middles_[code]; }
  /// Of x in [-1, 1]; between two values the lower one where they are equally near. NaN: 0.
  uint8_t code(T x) const { return static_cast<uint8_t>(std::ranges::lower_bound(middles_, x) - middles_.begin()); }

 private:
  std::array<T, 256> values_{};
  std::array<T, 255> middles_{};
};

/// A book for vectors of fp32: numbers of one sign that share their exponent and seven digits lie on at most two sides of one
/// middle, so that an entry and one comparison of the digits below give the code.
struct FastCodebook {
  static constexpr int kShift = 16;
  static constexpr int32_t kLowBits = (1 << kShift) - 1;
  /// Below 2^-23, and so below the smallest middle, all keys are one.
  static constexpr int32_t kFirstKey = (std::bit_cast<int32_t>(0x1p-23F) >> kShift) - 1;
  static constexpr int32_t kKeys = (std::bit_cast<int32_t>(1.0F) >> kShift) - kFirstKey + 1;

  std::array<float, 256> values;
  /// By key - kFirstKey, first of numbers above zero. High bits: code of the smallest magnitude with this key; low bits: the largest
  /// low bits for which it holds. Beyond them the code is the next one, for negative numbers the one before.
  std::array<int32_t, size_t{2} * kKeys> entries;

  explicit FastCodebook(const Codebook<float>& book) {
    for (size_t code = 0; code < values.size(); ++code) values[code] = book.value(static_cast<uint8_t>(code));
    for (const float sign : {1.0F, -1.0F}) {
      for (int32_t key = 0; key < kKeys; ++key) {
        const auto code_at = [&](int32_t low) { return book.code(sign * std::bit_cast<float>((key + kFirstKey) << kShift | low)); };
        const uint8_t code = code_at(0);
        int32_t holds = 0, beyond = kLowBits + 1;
        while (beyond - holds > 1) {
          const int32_t between = (holds + beyond) / 2;
          (code_at(between) == code ? holds : beyond) = between;
        }
        entries[static_cast<size_t>(sign > 0 ? key : key + kKeys)] = code << kShift | holds;
      }
    }
  }
};

}  // namespace weft::optim
