#include "weft/data/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "weft/core/error.h"

namespace weft::data {
namespace {

/// Rounds of the network. Four make it indistinguishable to an adversary with few queries (Luby and Rackoff 1988);
/// small grids mix less per round, hence twice as many.
constexpr uint64_t kRounds = 8;

/// Finaliser of SplitMix64 (Steele, Lea and Flood 2014): every input bit reaches every output bit.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

uint64_t side_of_square(uint64_t n) {
  auto side = static_cast<uint64_t>(std::sqrt(static_cast<double>(n)));
  while (side * side < n) ++side;
  return side;
}

}  // namespace

Permutation::Permutation(uint64_t n, uint64_t seed, uint64_t epoch)
    : n_(n), side_(side_of_square(n)), key_(mix(mix(seed) ^ epoch)) {}

uint64_t Permutation::round_trip(uint64_t value) const {
  uint64_t left = value / side_, right = value % side_;
  for (uint64_t round = 0; round < kRounds; ++round) {
    // Reduced before the sum: a sum that wraps at 2^64 would map two values to one.
    const uint64_t next = (left + mix(right ^ mix(key_ + round)) % side_) % side_;
    left = right;
    right = next;
  }
  return left * side_ + right;
}

uint64_t Permutation::operator()(uint64_t index) const {
  do {
    index = round_trip(index);
  } while (index >= n_);
  return index;
}

Sampler::Sampler(int64_t samples, uint64_t seed, bool shuffle) : samples_(samples), seed_(seed), shuffle_(shuffle) {
  if (samples < 1) throw InternalError(fmt::format("a sampler over {} samples", samples));
}

int64_t Sampler::at(int64_t position) const {
  const int64_t index = position % samples_;
  if (!shuffle_) return index;
  const Permutation order(static_cast<uint64_t>(samples_), seed_, static_cast<uint64_t>(epoch(position)));
  return static_cast<int64_t>(order(static_cast<uint64_t>(index)));
}

Share share_of(int64_t total, int64_t parts, int64_t index) {
  const int64_t base = total / parts, larger = total % parts;
  return {.begin = index * base + std::min(index, larger), .count = base + (index < larger ? 1 : 0)};
}

}  // namespace weft::data
