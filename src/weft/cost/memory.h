// Bytes on one rank: model states by sharding strategy, saved activations by layer kind and recompute mode.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "weft/layout/layout.h"
#include "weft/machine/machine.h"
#include "weft/model/spec.h"

namespace weft::cost {

/// Bytes per parameter of weights, gradients and optimizer state, and what the sharding stage divides.
struct StateBytes {
  double weight = 2;
  double gradient = 4;
  double optimizer = 12;  ///< fp32 master and two moments

  /// Bytes per parameter when stage `zero` shards over `ranks` (ZeRO, arXiv 1910.02054, section 5).
  double per_parameter(int zero, double ranks) const;
};

/// Bytes of the moments that `optimizer` (adamw, adamw_bf16, adam8bit, lion, sgd, adafactor, muon) keeps of a parameter of `shape`; fp32
/// masters of 16-bit weights are 4 bytes per element more. wide: bytes of a moment, 8 where weights are fp64. muon: as for a matrix that
/// it orthogonalises; its other parameters have adamw's. ConfigError for a name that is not known.
double moment_bytes(const std::string& optimizer, const std::vector<int64_t>& shape, double wide = 4);

/// Model states of the ZeRO paper in bytes: (2 + 2 + k) p and its stages.
double zero_state_bytes(double parameters, double ranks, int stage, double optimizer_bytes = 12);
/// Bytes that one rank sends per step, in bytes: 2 (n-1)/n of the parameter bytes, 3 (n-1)/n at stage 3.
double zero_traffic_bytes(double parameters, double ranks, int stage, double bytes_per_parameter = 2);

/// Saved activations of one GPT layer in the classic form (Korthikanti et al. 2022, table 2): multi-head attention, GELU,
/// dropout, no flash kernel. bytes for a whole micro-batch on one of `tp` ranks.
enum class ClassicForm { tensor, sequence, selective, full };
double classic_layer_bytes(double sequence, double batch, double hidden, double heads, double tp, ClassicForm form);

/// Saved activations of one block with a flash kernel, per rank and micro-batch, by term.
struct BlockBytes {
  double norms = 0;      ///< inputs and outputs of the norms
  double attention = 0;  ///< Q, attention output, K, V, log-sum-exp; scores and masks without a flash kernel
  double mlp = 0;
  double experts = 0;
  double masks = 0;      ///< dropout masks
  double copies = 0;     ///< fp32 copies inside eager norms
  double total() const { return norms + attention + mlp + experts + masks + copies; }
};

/// Sizes that the activation formulas need.
struct ActivationShape {
  double tokens = 0;    ///< sequence * micro-batch / cp
  double sequence = 0;
  double tp = 1;
  bool sequence_parallel = false;
  bool low_precision = false;
  double etp = 1;
  double imbalance = 1;
};

BlockBytes block_bytes(const model::BlockSpec& block, double hidden, bool layer_norm, const ActivationShape& shape, const machine::Software& software);

/// What stays of a block's activations until its backward under `recompute`.
double kept_bytes(const model::BlockSpec& block, const BlockBytes& bytes, double hidden, const ActivationShape& shape, layout::Recompute recompute, bool flash);

/// Micro-batches (in units of a rank's whole share of layers) that stage `stage` holds at the end of the warm-up.
/// Schedules: gpipe, 1f1b (interleaved with chunks > 1), zb-h1, zb-h2, zb-v.
double in_flight(const std::string& schedule, int64_t pp, int64_t chunks, int64_t micro_batches, int64_t stage);

/// Inference: weights at `bits` per weight with one `scale_bits` scale per `group` weights (0: none).
double weight_bytes(double parameters, double bits, double group = 0, double scale_bits = 16);
/// Keys and values of one token, all layers, 16 bit unless told otherwise.
double kv_cache_bytes_per_token(const model::ModelSpec& spec, double bytes_per_value = 2);

}  // namespace weft::cost
