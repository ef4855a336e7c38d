// Time of matrix products and memory-bound kernels on one device.
#pragma once

#include <cstdint>

#include "weft/cost/tuning.h"
#include "weft/machine/device.h"

namespace weft::cost {

/// C[m, n] = A[m, k] B[k, n].
struct Gemm {
  double m = 0, n = 0, k = 0;
  double batch = 1;  ///< independent products of this size in one launch (grouped experts)

  double flops() const { return 2.0 * m * n * k * batch; }
};

/// A device prepared for many evaluations.
struct Rates {
  double matmul = 0;       ///< FLOP/s of the largest 16-bit products
  double matmul_low = 0;   ///< the same in fp8 / fp4 where asked for, else equal to matmul
  double attention = 0;    ///< FLOP/s that shares of attention kernels refer to: the measured products' rate
  double memory = 0;       ///< B/s that streaming kernels reach
  double multiprocessors = 1;
  double element = 2;      ///< bytes of an activation: 4 in fp32
  double gap = 0;          ///< s lost per kernel on the device, with a full queue
  double fill = 0;         ///< s that a wave of tiles loses to filling and draining its pipeline

  static Rates of(const machine::Device& device, machine::Precision precision, const Tuning& tuning);
};

/// Share of the largest products' rate that an m x n x k product reaches: tile and wave quantisation (the last wave of
/// tiles fills only some multiprocessors) times k / (k + k_fill), the pipeline's fill. Best of the usual tile sizes.
double gemm_efficiency(const Gemm& gemm, double multiprocessors, double k_fill);

/// Seconds: arithmetic, then the result's way to memory, which starts when a tile's sum is complete; at least the time of all
/// traffic; plus the gap. `out_bytes` per element of C (8 when it accumulates in fp32).
double gemm_time(const Gemm& gemm, const Rates& rates, bool low_precision, double out_bytes = 2.0);

/// Seconds of a kernel that streams `bytes` of 16-bit activations, twice as many in fp32.
double stream_time(double bytes, const Rates& rates);

}  // namespace weft::cost
