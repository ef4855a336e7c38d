#include "weft/core/philox.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <numeric>
#include <set>
#include <vector>

namespace weft::philox {
namespace {

// Known answers of philox4x32-10 from the Random123 distribution (kat_vectors).
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(block({0, 0, 0, 0}, {0, 0}), (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(block({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(block({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, SeedIsTheKeyAndIndexAndStreamAreTheCounter) {
  const uint64_t seed = 0x299f31d0a4093822, stream = 0x0370734413198a2e, number = 0x05a308d3243f6a88;
  const Block expected = block({0x243f6a88, 0x05a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0});
  for (uint64_t word = 0; word < 4; ++word) EXPECT_EQ(bits(seed, stream, number * 4 + word), expected[word]);
}

TEST(Philox, StreamOfIsStable) {
  EXPECT_EQ(stream_of("layers.0.attn.wq.weight"), stream_of("layers.0.attn.wq.weight"));
  std::set<uint64_t> streams;
  for (int layer = 0; layer < 1000; ++layer)
    streams.insert(stream_of("layers." + std::to_string(layer) + ".attn.wq.weight"));
  EXPECT_EQ(streams.size(), 1000u);
  // Files and runs of earlier versions depend on these numbers.
  EXPECT_EQ(stream_of(""), 0xf52a15e9a9b5e89bu);
  EXPECT_EQ(stream_of("tok.weight"), 0x01da97a8da5423a8u);
}

template <typename T>
void expect_slices_agree() {
  const uint64_t first = (uint64_t{1} << 34) - 37;  // crosses a carry of the 32-bit counter word
  constexpr size_t n = 1003;
  std::vector<T> whole_uniform(n), whole_normal(n);
  fill_uniform(std::span<T>(whole_uniform), 7, 9, first, -2.0, 3.0);
  fill_normal(std::span<T>(whole_normal), 7, 9, first, 0.5, 2.0);
  for (const size_t step : {1, 2, 3, 5, 64, 67, 500}) {
    std::vector<T> uniform_parts(n), normal_parts(n);
    for (size_t begin = 0; begin < n; begin += step) {
      const size_t count = std::min(step, n - begin);
      fill_uniform(std::span<T>(uniform_parts).subspan(begin, count), 7, 9, first + begin, -2.0, 3.0);
      fill_normal(std::span<T>(normal_parts).subspan(begin, count), 7, 9, first + begin, 0.5, 2.0);
    }
    EXPECT_EQ(whole_uniform, uniform_parts) << step;
    EXPECT_EQ(whole_normal, normal_parts) << step;
  }
  for (const size_t i : {0, 1, 2, 63, 64, 1002}) {
    EXPECT_EQ(whole_normal[i], static_cast<T>(0.5 + 2.0 * normal(7, 9, first + i))) << i;
  }
}

TEST(Philox, SlicesAgreeFloat) {
  expect_slices_agree<float>();
}
TEST(Philox, SlicesAgreeDouble) {
  expect_slices_agree<double>();
}

TEST(Philox, FloatIsDoubleRounded) {
  std::vector<float> narrow(4096);
  std::vector<double> wide(4096);
  fill_normal(std::span<float>(narrow), 3, 4, 11);
  fill_normal(std::span<double>(wide), 3, 4, 11);
  for (size_t i = 0; i < narrow.size(); ++i) ASSERT_EQ(narrow[i], static_cast<float>(wide[i]));
}

// The vector code against the C library's functions.
TEST(Philox, NormalIsBoxMullerOfTheWords) {
  for (uint64_t i = 0; i < 100000; i += 2) {
    const double u = (bits(1, 2, i) + 0.5) / 4294967296.0,
                 angle = 2 * std::numbers::pi * (bits(1, 2, i + 1) / 4294967296.0);
    const double radius = std::sqrt(-2 * std::log(u));
    ASSERT_NEAR(normal(1, 2, i), radius * std::cos(angle), 4e-15) << i;
    ASSERT_NEAR(normal(1, 2, i + 1), radius * std::sin(angle), 4e-15) << i;
  }
}

TEST(Philox, MomentsAndRanges) {
  constexpr size_t n = 1 << 20;
  std::vector<float> u(n);
  std::vector<double> z(n);
  fill_uniform(std::span<float>(u), 42, stream_of("u"), 0);
  fill_normal(std::span<double>(z), 42, stream_of("z"), 0);
  const auto [low, high] = std::minmax_element(u.begin(), u.end());
  EXPECT_GE(*low, 0.0f);
  EXPECT_LT(*high, 1.0f);
  double mean_u = 0, m1 = 0, m2 = 0, m4 = 0, neighbours = 0;
  for (size_t i = 0; i < n; ++i) {
    mean_u += u[i] / double(n);
    m1 += z[i] / double(n);
    m2 += z[i] * z[i] / double(n);
    m4 += z[i] * z[i] * z[i] * z[i] / double(n);
    neighbours += z[i] * z[(i + 1) % n] / double(n);
  }
  const double sigma = 1 / std::sqrt(double(n));  // each bound is five standard errors
  EXPECT_NEAR(mean_u, 0.5, 5 * sigma * std::sqrt(1.0 / 12));
  EXPECT_NEAR(m1, 0.0, 5 * sigma);
  EXPECT_NEAR(m2, 1.0, 5 * sigma * std::sqrt(2.0));
  EXPECT_NEAR(m4, 3.0, 5 * sigma * std::sqrt(96.0));
  EXPECT_NEAR(neighbours, 0.0, 5 * sigma);
}

TEST(Philox, EmptyRange) {
  fill_normal(std::span<float>(), 1, 2, 3);
}

}  // namespace
}  // namespace weft::philox
