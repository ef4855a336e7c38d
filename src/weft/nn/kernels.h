// Which implementation of a layer's arithmetic runs.
#pragma once

namespace weft::nn {

/// torch: libtorch's operators, bit-equal to the same model written in plain libtorch. fused: own one-pass CPU kernels
/// (CPU tensors of fp64, fp32 or bf16); equal within rounding: 1e-12 relative in fp64, 1e-6 in fp32.
enum class Kernels { torch, fused };

}  // namespace weft::nn
