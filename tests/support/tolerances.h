// How far from the one-rank reference a layout may be (promise 1), stated once.
#pragma once

namespace weft::testing {

/// fp64, relative: losses, gradients, norms and weights. Rounding hides nothing here: a wrong term is many times larger.
inline constexpr double kFp64Parity = 1e-10;
/// fp32, relative: losses over tens of steps, which carry the rounding of every step before; and of the first step alone.
inline constexpr double kFp32Losses = 1e-5;
inline constexpr double kFp32FirstLoss = 1e-6;
/// An injected fault counts as caught when the fp64 result is off by more than this: far above what rounding does.
inline constexpr double kFaultSeen = 1e-6;

}  // namespace weft::testing
