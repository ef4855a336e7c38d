// Reduction kernels of the local back end against plain scalar code, for every instruction set of this machine.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "weft/comm/local/reduce.h"

namespace weft::local {
namespace {

template <class T>
struct Accumulator {
  using Type = T;
};
template <>
struct Accumulator<c10::Half> {
  using Type = float;
};
template <>
struct Accumulator<c10::BFloat16> {
  using Type = float;
};

template <class T>
T reference(const std::vector<std::vector<T>>& sources, size_t i, Reduce op) {
  using A = typename Accumulator<T>::Type;
  A total = static_cast<A>(sources[0][i]);
  for (size_t s = 1; s < sources.size(); ++s) {
    const A next = static_cast<A>(sources[s][i]);
    if (op == Reduce::min) total = next < total ? next : total;
    else if (op == Reduce::max) total = total < next ? next : total;
    else if (op == Reduce::product) total = static_cast<A>(total * next);
    else total = static_cast<A>(total + next);
  }
  if (op == Reduce::avg) total = static_cast<A>(total / static_cast<A>(sources.size()));
  return static_cast<T>(total);
}

template <class T>
T random_value(std::mt19937& random) {
  // Wide enough that low-precision sums round, small enough that integers of every width hold products of 5.
  if constexpr (std::is_integral_v<T>) return static_cast<T>(random() % 3);
  else return static_cast<T>(std::normal_distribution<float>()(random) * std::ldexp(1.0f, static_cast<int>(random() % 8)));
}

template <class T>
void compare(Dtype dtype, size_t count, int n, Reduce op, bool in_place) {
  std::mt19937 random(static_cast<uint32_t>(count * 31 + static_cast<size_t>(n)));
  std::vector<std::vector<T>> sources(static_cast<size_t>(n));
  std::vector<const void*> pointers;
  for (auto& source : sources) {
    for (size_t i = 0; i < count + 1; ++i) source.push_back(random_value<T>(random));
  }
  std::vector<std::vector<T>> expected_from = sources;
  for (auto& source : sources) pointers.push_back(source.data() + 1);  // unaligned
  std::vector<T> apart(count);
  T* out = in_place ? sources.back().data() + 1 : apart.data();
  reduce(out, pointers.data(), n, count, dtype, op);
  for (size_t i = 0; i < count; ++i) {
    const T expected = reference(expected_from, i + 1, op);
    ASSERT_EQ(std::memcmp(&out[i], &expected, sizeof(T)), 0)
        << name_of(dtype) << " " << name_of(op) << " element " << i << " of " << count << ", " << n << " sources: "
        << static_cast<double>(out[i]) << " against " << static_cast<double>(expected);
  }
}

template <class T>
void compare_all(Dtype dtype) {
  for (Reduce op : {Reduce::sum, Reduce::avg, Reduce::min, Reduce::max, Reduce::product}) {
    for (size_t count : {0, 1, 3, 16, 63, 257, 1000}) {
      for (int n : {1, 2, 3, 5}) {
        compare<T>(dtype, count, n, op, false);
        compare<T>(dtype, count, n, op, true);
      }
    }
  }
}

class LocalReduce : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

std::vector<int64_t> targets() {
  std::vector<int64_t> all;
  for (int64_t rest = hwy::SupportedTargets(); rest != 0; rest &= rest - 1) all.push_back(rest & -rest);
  return all;
}

TEST_P(LocalReduce, EqualsScalarCode) {
  compare_all<float>(Dtype::f32);
  compare_all<double>(Dtype::f64);
  compare_all<c10::BFloat16>(Dtype::bf16);
  compare_all<c10::Half>(Dtype::f16);
  compare_all<int8_t>(Dtype::i8);
  compare_all<uint8_t>(Dtype::u8);
  compare_all<int16_t>(Dtype::i16);
  compare_all<int32_t>(Dtype::i32);
  compare_all<int64_t>(Dtype::i64);
}

// One source: what is loaded must be stored again, subnormals and infinities too.
TEST_P(LocalReduce, KeepsEveryHalfValue) {
  for (Dtype dtype : {Dtype::bf16, Dtype::f16}) {
    std::vector<uint16_t> in(65536), out(65536);
    for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint16_t>(i);
    const void* source = in.data();
    reduce(out.data(), &source, 1, in.size(), dtype, Reduce::sum);
    for (size_t i = 0; i < in.size(); ++i) {
      const bool nan = dtype == Dtype::bf16 ? (i & 0x7fff) > 0x7f80 : (i & 0x7fff) > 0x7c00;
      if (nan) {
        ASSERT_GT(out[i] & 0x7fff, dtype == Dtype::bf16 ? 0x7f80 : 0x7c00) << "a NaN must stay one: " << i;
      } else {
        ASSERT_EQ(out[i], in[i]) << name_of(dtype);
      }
    }
  }
}

// Sums of two: every rounding case of the narrow types, overflow to infinity included, against c10's own conversion.
TEST_P(LocalReduce, RoundsHalvesToNearestEven) {
  std::mt19937 random(5);
  std::vector<c10::Half> a, b;
  std::vector<c10::BFloat16> c, d;
  for (int i = 0; i < 100'000; ++i) {
    const uint32_t bits = random();
    a.emplace_back(static_cast<uint16_t>(bits), c10::Half::from_bits());
    b.emplace_back(static_cast<uint16_t>(bits >> 16), c10::Half::from_bits());
    c.emplace_back(static_cast<uint16_t>(bits), c10::BFloat16::from_bits());
    d.emplace_back(static_cast<uint16_t>(bits >> 16), c10::BFloat16::from_bits());
  }
  std::vector<c10::Half> half(a.size());
  std::vector<c10::BFloat16> brain(a.size());
  const void* halves[] = {a.data(), b.data()};
  const void* brains[] = {c.data(), d.data()};
  reduce(half.data(), halves, 2, a.size(), Dtype::f16, Reduce::sum);
  reduce(brain.data(), brains, 2, a.size(), Dtype::bf16, Reduce::sum);
  for (size_t i = 0; i < a.size(); ++i) {
    const float sum = static_cast<float>(a[i]) + static_cast<float>(b[i]);
    if (std::isnan(sum)) ASSERT_TRUE(std::isnan(static_cast<float>(half[i])));
    else ASSERT_EQ(half[i].x, c10::Half(sum).x) << sum;
    const float wide = static_cast<float>(c[i]) + static_cast<float>(d[i]);
    if (std::isnan(wide)) ASSERT_TRUE(std::isnan(static_cast<float>(brain[i])));
    else ASSERT_EQ(brain[i].x, c10::BFloat16(wide).x) << wide;
  }
}

TEST_P(LocalReduce, PassesNanOn) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (Reduce op : {Reduce::sum, Reduce::avg, Reduce::min, Reduce::max, Reduce::product}) {
    for (int at : {0, 1, 2}) {
      std::vector<std::vector<float>> sources(3, std::vector<float>(40, 1.0f));
      sources[static_cast<size_t>(at)][7] = sources[static_cast<size_t>(at)][39] = nan;
      const void* pointers[] = {sources[0].data(), sources[1].data(), sources[2].data()};
      std::vector<float> out(40);
      reduce(out.data(), pointers, 3, 40, Dtype::f32, op);
      EXPECT_TRUE(std::isnan(out[7]) && std::isnan(out[39])) << name_of(op) << ", NaN on source " << at;
      EXPECT_FALSE(std::isnan(out[8]));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, LocalReduce, ::testing::ValuesIn(targets()),
                         [](const auto& info) { return std::string(hwy::TargetName(info.param)); });

TEST(LocalReduceBool, IsOrAndAnd) {
  const uint8_t a[] = {0, 0, 1, 1}, b[] = {0, 1, 0, 1};
  const void* sources[] = {a, b};
  uint8_t out[4];
  reduce(out, sources, 2, 4, Dtype::boolean, Reduce::sum);
  EXPECT_EQ(std::vector<uint8_t>(out, out + 4), (std::vector<uint8_t>{0, 1, 1, 1}));
  reduce(out, sources, 2, 4, Dtype::boolean, Reduce::product);
  EXPECT_EQ(std::vector<uint8_t>(out, out + 4), (std::vector<uint8_t>{0, 0, 0, 1}));
  EXPECT_FALSE(can_reduce(Dtype::boolean, Reduce::avg));
  EXPECT_FALSE(can_reduce(Dtype::other, Reduce::sum));
}

}  // namespace
}  // namespace weft::local
