// The order of samples: a function of (seed, epoch, global index) alone, without a stored permutation.
#pragma once

#include <cstdint>

namespace weft::data {

/// A permutation of [0, n) picked by (seed, epoch). Each value takes O(1) time and no memory: a Feistel network on a
/// grid of a x a >= n cells (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"), walked until the value
/// falls below n; the grid is at most 2 sqrt(n) + 1 cells too large, so that walks are rare.
class Permutation {
 public:
  /// n >= 1.
  Permutation(uint64_t n, uint64_t seed, uint64_t epoch);
  /// index < n.
  uint64_t operator()(uint64_t index) const;

 private:
  uint64_t round_trip(uint64_t value) const;

  uint64_t n_, side_, key_;
};

/// Which sample the k-th position of the endless training stream is. Position = samples consumed by all ranks since the
/// start, across epochs: the only state of the data, so that a resume needs one integer and any number of ranks.
/// A global batch may straddle two epochs; within an epoch every sample occurs exactly once. A set smaller than the
/// global batch repeats.
class Sampler {
 public:
  /// samples >= 1. Without shuffle, every epoch runs in file order.
  Sampler(int64_t samples, uint64_t seed, bool shuffle = true);

  int64_t samples() const { return samples_; }
  int64_t epoch(int64_t position) const { return position / samples_; }
  /// Sample at `position` >= 0.
  int64_t at(int64_t position) const;

 private:
  int64_t samples_;
  uint64_t seed_;
  bool shuffle_;
};

/// Part `index` of `parts` of [0, total): contiguous, sizes differ by at most one, larger parts first.
struct Share {
  int64_t begin = 0;
  int64_t count = 0;
};
Share share_of(int64_t total, int64_t parts, int64_t index);

}  // namespace weft::data
