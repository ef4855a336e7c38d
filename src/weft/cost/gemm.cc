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
constexpr Tile kTiles[] = {{256, 128, 1.0}, {128, 256, 1.0}, {192, 128, 0.97}, {128, 192, 0.97}, {128, 128, 0.93}, {128, 64, 0.80}, {64, 64, 0.62}};

}  // namespace

Rates Rates::of(const machine::Device& device, machine::Precision precision, const Tuning& tuning) {
  Rates rates;
  const bool low = precision == machine::Precision::fp8 || precision == machine::Precision::fp4;
  const machine::Precision wide = low ? machine::Precision::bf16 : precision;
  rates.matmul = 1e12 * tuning.gemm_share * machine::matmul_tflops(device, wide);
  rates.matmul_low = low ? 1e12 * tuning.gemm_share * tuning.fp8_share * machine::matmul_tflops(device, precision) : rates.matmul;
  if (device.generation == 10) rates.matmul *= tuning.blackwell_share, rates.matmul_low *= tuning.blackwell_share;
  rates.memory = 1e12 * tuning.memory_share * device.memory_tbps;
  rates.multiprocessors = static_cast<double>(device.multiprocessors);
  rates.gap = 1e-6 * tuning.kernel_gap_us;
  // The fill is a time, so in units of k it grows with the rate per multiprocessor; A100 is the reference.
  const double reference = 312e12 / 108;
  rates.k_half = tuning.gemm_k_half * std::sqrt(1e12 * device.bf16_tflops / rates.multiprocessors / reference);
  rates.k_half_low = rates.k_half * std::pow(rates.matmul_low / rates.matmul, tuning.low_k_growth);
  return rates;
}

double gemm_efficiency(const Gemm& gemm, double multiprocessors, double k_half) {
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
  return std::max(best, split) * gemm.k / (gemm.k + k_half);
}

double gemm_time(const Gemm& gemm, const Rates& rates, bool low_precision, double out_bytes) {
  const double rate = low_precision ? rates.matmul_low : rates.matmul;
  const double in_bytes = low_precision ? 1.0 : 2.0;
  const double efficiency = gemm_efficiency(gemm, rates.multiprocessors, low_precision ? rates.k_half_low : rates.k_half);
  const double arithmetic = gemm.flops() / (rate * efficiency);
  const double bytes = gemm.batch * (in_bytes * (gemm.m * gemm.k + gemm.n * gemm.k) + out_bytes * gemm.m * gemm.n);
  return std::max(arithmetic, bytes / rates.memory) + rates.gap;
}

double stream_time(double bytes, const Rates& rates) { return bytes / rates.memory + rates.gap; }

}  // namespace weft::cost
