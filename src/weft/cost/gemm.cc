#include "weft/cost/gemm.h"

#include <algorithm>
#include <cmath>

namespace weft::cost {
namespace {

/// Output tiles that matrix libraries choose from. Smaller tiles re-read their operands more often: `share` of the
/// rate of the largest tile, from the ratio of arithmetic to shared-memory traffic m n / (m + n).
struct Tile {
  double m, n, share;
};
constexpr Tile kTiles[] = {{256, 128, 1.0}, {128, 256, 1.0}, {128, 128, 0.85}, {128, 64, 0.70}, {64, 64, 0.5}};

/// A multiprocessor that stores a tile computes nothing meanwhile. Stores of different tiles come at different times, so they go
/// at the rate of the second-level cache, about twice the memory's.
constexpr double kExposedStore = 0.5;

}  // namespace

Rates Rates::of(const machine::Device& device, machine::Precision precision, const Tuning& tuning) {
  Rates rates;
  const bool low = precision == machine::Precision::fp8 || precision == machine::Precision::fp4;
  const machine::Precision wide = low ? machine::Precision::bf16 : precision;
  rates.matmul = 1e12 * tuning.gemm_share * machine::matmul_tflops(device, wide);
  rates.matmul_low = low ? 1e12 * tuning.gemm_share * machine::matmul_tflops(device, precision) : rates.matmul;
  if (device.generation >= 9) rates.matmul *= tuning.sustained_share, rates.matmul_low *= tuning.sustained_share;
  if (device.generation == 10) {
    rates.matmul *= tuning.blackwell_share;
    if (!low) rates.matmul_low *= tuning.blackwell_share;
  }
  rates.memory = 1e12 * tuning.memory_share * device.memory_tbps;
  rates.multiprocessors = static_cast<double>(device.multiprocessors);
  rates.gap = 1e-6 * tuning.kernel_gap_us;
  rates.element = precision == machine::Precision::fp32 ? 4 : 2;
  if (device.calibrated) {
    // Measured with this machine's own kernels, in which shares, fills and gaps are contained.
    rates.matmul = 1e12 * machine::matmul_tflops(device, wide);
    rates.matmul_low = low ? 1e12 * machine::matmul_tflops(device, precision) : rates.matmul;
    rates.memory = 1e12 * device.memory_tbps;
    rates.gap = 1e-6 * device.operation_us;
    rates.attention = rates.matmul;
    // What a real step reached of what these rates promise.
    const double share = precision == machine::Precision::fp32 ? device.training_share_fp32 : device.training_share_bf16;
    rates.matmul *= share, rates.matmul_low *= share, rates.attention *= share, rates.memory *= share, rates.gap /= share;
    return rates;
  }
  rates.attention = 1e12 * machine::matmul_tflops(device, wide);
  rates.fill = 1e-6 * tuning.gemm_fill_us;
  return rates;
}

double gemm_efficiency(const Gemm& gemm, double multiprocessors, double k_fill) {
  double best = 0;
  for (const Tile& tile : kTiles) {
    const double rows = std::ceil(gemm.m / tile.m), columns = std::ceil(gemm.n / tile.n);
    const double tiles = rows * columns * gemm.batch;
    const double fill = gemm.m * gemm.n / (rows * tile.m * columns * tile.n);
    const double wave = tiles / (std::ceil(tiles / multiprocessors) * multiprocessors);
    best = std::max(best, fill * wave * tile.share);
  }
  // Long products over few tiles are split along k, which fills the device at the price of a reduction.
  const double split = 0.75 * std::min(1.0, gemm.m * gemm.n * gemm.k * gemm.batch / (128.0 * 128 * 1024 * multiprocessors));
  return std::max(best, split) * gemm.k / (gemm.k + k_fill);
}

double gemm_time(const Gemm& gemm, const Rates& rates, bool low_precision, double out_bytes) {
  const double rate = low_precision ? rates.matmul_low : rates.matmul;
  const double in_bytes = low_precision ? 1.0 : rates.element;
  // The fill is a time; in steps of k it is longer on faster multiprocessors.
  const double k_fill = rates.fill * rate / (rates.multiprocessors * 2 * kTiles[0].m * kTiles[0].n);
  const double efficiency = gemm_efficiency(gemm, rates.multiprocessors, k_fill);
  const double arithmetic = gemm.flops() / (rate * efficiency);
  const double in = gemm.batch * in_bytes * (gemm.m * gemm.k + gemm.n * gemm.k), out = gemm.batch * std::max(out_bytes, rates.element) * gemm.m * gemm.n;
  return std::max(arithmetic + kExposedStore * out / rates.memory, (in + out) / rates.memory) + rates.gap;
}

double stream_time(double bytes, const Rates& rates) { return bytes * rates.element / 2 / rates.memory + rates.gap; }

}  // namespace weft::cost
