// Counter-based random numbers for weights and dropout: any element by its index, in any order, on any rank.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string_view>

namespace weft::nn {

/// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
inline std::array<uint32_t, 4> philox(uint64_t key, uint64_t low, uint64_t high) {
  constexpr uint64_t kMultiply0 = 0xD2511F53, kMultiply1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  constexpr int kRounds = 10;
  auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  std::array<uint32_t, 4> c{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
                            static_cast<uint32_t>(high >> 32)};
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t p0 = kMultiply0 * c[0], p1 = kMultiply1 * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
    k0 += kWeyl0;
    k1 += kWeyl1;
  }
  return c;
}

/// The key of a named stream: FNV-1a of the name, mixed with the seed by splitmix64's finaliser.
inline uint64_t stream_key(uint64_t seed, std::string_view name) {
  uint64_t x = 0xCBF29CE484222325;
  for (const char c : name) x = (x ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  x += seed * 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

/// Uniform in (0, 1).
inline double to_uniform(uint32_t word) { return (word + 0.5) * 0x1p-32; }

/// Four standard normals from one Philox block (Box and Muller 1958).
inline std::array<double, 4> to_normals(const std::array<uint32_t, 4>& words) {
  std::array<double, 4> out{};
  for (size_t pair = 0; pair < 2; ++pair) {
    const double radius = std::sqrt(-2.0 * std::log(to_uniform(words[2 * pair])));
    const double angle = 2.0 * std::numbers::pi * to_uniform(words[2 * pair + 1]);
    out[2 * pair] = radius * std::cos(angle);
    out[2 * pair + 1] = radius * std::sin(angle);
  }
  return out;
}

}  // namespace weft::nn
