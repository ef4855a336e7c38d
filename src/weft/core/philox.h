// Counter-based random numbers: every number is a function of (seed, stream, global index) and of nothing else, so that
// initial weights, dropout masks and data order do not depend on how many ranks share the work.
//
// Generator: Philox4x32 with 10 rounds (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC
// 2011). key = seed, counter = (index / 4, stream), word = index % 4.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

namespace weft::philox {

using Block = std::array<uint32_t, 4>;
using Key = std::array<uint32_t, 2>;

/// The bare generator: 128 random bits for a counter and a key.
Block block(Block counter, Key key);

/// A stable 64-bit number for a name ("layers.3.attn.wq.weight", "dropout/attn"): the stream of that parameter or
/// layer.
uint64_t stream_of(std::string_view name);

/// 32 random bits.
uint32_t bits(uint64_t seed, uint64_t stream, uint64_t index);
/// Uniform in [0, 1) with 32 bits of resolution.
double uniform(uint64_t seed, uint64_t stream, uint64_t index);
/// Standard normal by Box-Muller; indices 2k and 2k+1 form a pair. Magnitude at most 6.77.
double normal(uint64_t seed, uint64_t stream, uint64_t index);

/// out[i] = the number with global index first + i. However a range is cut in slices, the numbers are bit-identical,
/// also from machine to machine: only IEEE + - * / and sqrt are used. float results are the double results rounded to
/// nearest (fill_uniform rounds towards `low`, so that [0, 1) stays half open).
void fill_bits(std::span<uint32_t> out, uint64_t seed, uint64_t stream, uint64_t first);
void fill_uniform(std::span<float> out, uint64_t seed, uint64_t stream, uint64_t first, double low = 0.0,
                  double high = 1.0);
void fill_uniform(std::span<double> out, uint64_t seed, uint64_t stream, uint64_t first, double low = 0.0,
                  double high = 1.0);
void fill_normal(std::span<float> out, uint64_t seed, uint64_t stream, uint64_t first, double mean = 0.0,
                 double std = 1.0);
void fill_normal(std::span<double> out, uint64_t seed, uint64_t stream, uint64_t first, double mean = 0.0,
                 double std = 1.0);

}  // namespace weft::philox
