#include "weft/core/philox.h"

#include <algorithm>
#include <bit>
#include <cmath>

// Compiled with -O3 and without contraction into fused multiply-adds (src/weft/CMakeLists.txt): loops over kLanes
// blocks become vector code whose results equal the scalar ones bit for bit.
namespace weft::philox {
namespace {

constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
constexpr int kRounds = 10;

constexpr int kLanes = 16;          // blocks made at a time
constexpr int kBatch = 4 * kLanes;  // numbers made at a time
constexpr double kTwoTo32 = 4294967296.0;

/// Words of kLanes consecutive blocks, in order of their index.
void make_words(uint64_t seed, uint64_t stream, uint64_t first_block, uint32_t* out) {
  uint32_t c0[kLanes], c1[kLanes], c2[kLanes], c3[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const uint64_t number = first_block + static_cast<uint64_t>(i);
    c0[i] = static_cast<uint32_t>(number);
    c1[i] = static_cast<uint32_t>(number >> 32);
    c2[i] = static_cast<uint32_t>(stream);
    c3[i] = static_cast<uint32_t>(stream >> 32);
  }
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kRounds; ++round, k0 += kWeyl0, k1 += kWeyl1) {
    for (int i = 0; i < kLanes; ++i) {
      const uint64_t p0 = uint64_t{kMultiplier0} * c0[i], p1 = uint64_t{kMultiplier1} * c2[i];
      const uint32_t old1 = c1[i], old3 = c3[i];
      c0[i] = static_cast<uint32_t>(p1 >> 32) ^ old1 ^ k0;
      c1[i] = static_cast<uint32_t>(p1);
      c2[i] = static_cast<uint32_t>(p0 >> 32) ^ old3 ^ k1;
      c3[i] = static_cast<uint32_t>(p0);
    }
  }
  for (int i = 0; i < kLanes; ++i) {
    out[4 * i] = c0[i];
    out[4 * i + 1] = c1[i];
    out[4 * i + 2] = c2[i];
    out[4 * i + 3] = c3[i];
  }
}

/// ln(u) for u in (0, 1): u = m 2^e with m in [sqrt(1/2), sqrt(2)), ln m = 2 artanh((m-1)/(m+1)) by its series, whose
/// first omitted term is below 1e-17 there.
inline double log_unit(double u) {
  const uint64_t raw = std::bit_cast<uint64_t>(u);
  constexpr uint64_t kSqrtHalf = 0x3FE6A09E667F3BCD;  // bits of sqrt(1/2)
  constexpr uint64_t kExponentMask = 0xFFF0000000000000;
  const uint64_t shift = (raw - kSqrtHalf) & kExponentMask;
  // Exponent as a double without a 64-bit integer conversion, which SSE2 and AVX2 lack: bias it into the mantissa of
  // 2^52.
  constexpr double kMagic = 4503599627370496.0 + 2048.0;
  const double e = std::bit_cast<double>(((shift >> 52) ^ 0x800) | 0x4330000000000000) - kMagic;
  const double m = std::bit_cast<double>(raw - shift);
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double p = 1.0 / 21;
  for (double divisor : {19., 17., 15., 13., 11., 9., 7., 5., 3., 1.}) p = p * z + 1.0 / divisor;
  return e * 0.69314718055994530942 + 2.0 * s * p;
}

/// cos and sin of 2 pi u for u in [0, 1): the nearest quarter turn is removed exactly, Taylor series do the rest.
inline void cos_sin_turn(double u, double& cosine, double& sine) {
  const double quarter = static_cast<double>(static_cast<int32_t>(u * 4.0 + 0.5));  // 0 .. 4
  const double x = (u - quarter * 0.25) * 6.28318530717958647693, z = x * x;
  const double s =
      x * (1.0 + z * (-1.0 / 6 +
                      z * (1.0 / 120 +
                           z * (-1.0 / 5040 +
                                z * (1.0 / 362880 + z * (-1.0 / 39916800 +
                                                         z * (1.0 / 6227020800.0 + z * (-1.0 / 1307674368000.0))))))));
  const double c =
      1.0 +
      z * (-1.0 / 2 +
           z * (1.0 / 24 + z * (-1.0 / 720 +
                                z * (1.0 / 40320 + z * (-1.0 / 3628800 + z * (1.0 / 479001600.0 +
                                                                              z * (-1.0 / 87178291200.0 +
                                                                                   z * (1.0 / 20922789888000.0))))))));
  const bool odd = quarter == 1.0 || quarter == 3.0;
  const double a = odd ? s : c, b = odd ? c : s;
  cosine = (quarter == 1.0 || quarter == 2.0) ? -a : a;
  sine = (quarter == 2.0 || quarter == 3.0) ? -b : b;
}

inline void box_muller(uint32_t word0, uint32_t word1, double& first, double& second) {
  const double radius = std::sqrt(-2.0 * log_unit((word0 + 0.5) * (1.0 / kTwoTo32)));
  double cosine, sine;
  cos_sin_turn(word1 * (1.0 / kTwoTo32), cosine, sine);
  first = radius * cosine;
  second = radius * sine;
}

/// Calls make(words, numbers) for batches that cover [first, first + out.size()) and copies what was asked for.
template <typename T, typename Make>
void fill(std::span<T> out, uint64_t seed, uint64_t stream, uint64_t first, Make make) {
  uint32_t words[kBatch];
  T numbers[kBatch];
  for (size_t done = 0; done < out.size();) {
    const uint64_t block_number = (first + done) / 4;
    const size_t skip = (first + done) % 4;
    make_words(seed, stream, block_number, words);
    make(words, numbers);
    const size_t count = std::min<size_t>(kBatch - skip, out.size() - done);
    std::copy_n(numbers + skip, count, out.data() + done);
    done += count;
  }
}

template <typename T>
void fill_uniform_of(std::span<T> out, uint64_t seed, uint64_t stream, uint64_t first, double low, double high) {
  const double width = high - low;
  fill(out, seed, stream, first, [=](const uint32_t* words, T* numbers) {
    for (int i = 0; i < kBatch; ++i) {
      // A float holds 24 of the 32 bits; dropping the rest keeps u below 1.
      const uint32_t word = sizeof(T) == 4 ? words[i] & 0xFFFFFF00U : words[i];
      numbers[i] = static_cast<T>(low + width * (word * (1.0 / kTwoTo32)));
    }
  });
}

template <typename T>
void fill_normal_of(std::span<T> out, uint64_t seed, uint64_t stream, uint64_t first, double mean, double std) {
  fill(out, seed, stream, first, [=](const uint32_t* words, T* numbers) {
    // Even and odd words apart, so that the loop over pairs is vector code.
    uint32_t even[kBatch / 2], odd[kBatch / 2];
    double a[kBatch / 2], b[kBatch / 2];
    for (int i = 0; i < kBatch / 2; ++i) even[i] = words[2 * i], odd[i] = words[2 * i + 1];
    for (int i = 0; i < kBatch / 2; ++i) box_muller(even[i], odd[i], a[i], b[i]);
    for (int i = 0; i < kBatch / 2; ++i) {
      numbers[2 * i] = static_cast<T>(mean + std * a[i]);
      numbers[2 * i + 1] = static_cast<T>(mean + std * b[i]);
    }
  });
}

}  // namespace

Block block(Block counter, Key key) {
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t p0 = uint64_t{kMultiplier0} * counter[0], p1 = uint64_t{kMultiplier1} * counter[2];
    counter = {static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(p1),
               static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(p0)};
    key = {key[0] + kWeyl0, key[1] + kWeyl1};
  }
  return counter;
}

uint64_t stream_of(std::string_view name) {
  uint64_t hash = 0xCBF29CE484222325;  // FNV-1a, 64 bits
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  hash = (hash ^ (hash >> 30)) * 0xBF58476D1CE4E5B9;  // splitmix64's finaliser: close names get distant streams
  hash = (hash ^ (hash >> 27)) * 0x94D049BB133111EB;
  return hash ^ (hash >> 31);
}

uint32_t bits(uint64_t seed, uint64_t stream, uint64_t index) {
  const uint64_t number = index / 4;
  return block({static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32), static_cast<uint32_t>(stream),
                static_cast<uint32_t>(stream >> 32)},
               {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)})[index % 4];
}

double uniform(uint64_t seed, uint64_t stream, uint64_t index) {
  return bits(seed, stream, index) * (1.0 / kTwoTo32);
}

double normal(uint64_t seed, uint64_t stream, uint64_t index) {
  const uint64_t even = index & ~uint64_t{1};
  double first, second;
  box_muller(bits(seed, stream, even), bits(seed, stream, even + 1), first, second);
  return index == even ? first : second;
}

void fill_bits(std::span<uint32_t> out, uint64_t seed, uint64_t stream, uint64_t first) {
  fill(out, seed, stream, first, [](const uint32_t* words, uint32_t* numbers) { std::copy_n(words, kBatch, numbers); });
}

void fill_uniform(std::span<float> out, uint64_t seed, uint64_t stream, uint64_t first, double low, double high) {
  fill_uniform_of(out, seed, stream, first, low, high);
}
void fill_uniform(std::span<double> out, uint64_t seed, uint64_t stream, uint64_t first, double low, double high) {
  fill_uniform_of(out, seed, stream, first, low, high);
}
void fill_normal(std::span<float> out, uint64_t seed, uint64_t stream, uint64_t first, double mean, double std) {
  fill_normal_of(out, seed, stream, first, mean, std);
}
void fill_normal(std::span<double> out, uint64_t seed, uint64_t stream, uint64_t first, double mean, double std) {
  fill_normal_of(out, seed, stream, first, mean, std);
}

}  // namespace weft::philox
