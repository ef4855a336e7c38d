// Optimizer state that is kept elsewhere between the steps: in host memory beside a device, or on a disk beside a host.
#pragma once

namespace weft::cost {

/// What one step moves.
struct OffloadBytes {
  double in = 0;      ///< to where the update is computed (gradients to the host; state from the disk)
  double update = 0;  ///< that the update reads and writes in memory there
  double out = 0;     ///< back (weights to the device; state to the disk)
};

/// Bytes per second of the three.
struct OffloadRates {
  double in = 0, update = 0, out = 0;
};

/// Seconds of the update of an optimizer step in pieces: while one is updated the next comes in and the one before goes out, so the
/// slowest of the three counts (the overlap of ZeRO-Infinity, Rajbhandari et al. 2021).
double offload_seconds(const OffloadBytes& bytes, const OffloadRates& rates);

/// The part of it that transfers add to the update.
double exposed_offload_seconds(const OffloadBytes& bytes, const OffloadRates& rates);

}  // namespace weft::cost
