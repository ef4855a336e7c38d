// The same training steps under several layouts, compared with one rank.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "weft/comm/world.h"
#include "weft/config/run_config.h"
#include "weft/train/learner.h"

namespace weft::train {

struct VerifyOptions {
  int64_t steps = 3;
  /// Largest relative difference that is rounding; 0: 1e-10 in fp64, 1e-5 of losses and 5e-4 of tensors in fp32, and 5e-2 in 16 bits.
  double tolerance = 0;
  /// Called on every rank when its model is built, before the first step: faults that tests must see found.
  std::function<void(Learner&, const World&)> on_built;
};

/// One layout against one rank. A difference is max |a - b| / max |b| over a tensor's elements, with max |b| at least 1e-6 of the
/// largest gradient norm, 1e-3 of it below fp64 (weights: at least the learning rate, by which AdamW moves a weight); NaN is infinite.
struct VerifyRow {
  std::string layout;
  int ranks = 1;
  double loss = 0;       ///< largest of the steps
  double norm = 0;       ///< of the gradient before clipping, largest of the steps
  double gradient = 0;   ///< largest over all tensors, of the first step
  double weight = 0;     ///< the same of weights after the last step
  std::string first;     ///< what is out of tolerance first: "gradient of layers.0.attn.wq.weight", or why the layout failed; else empty
  bool ok() const { return first.empty(); }
};

struct VerifyReport {
  std::string dtype;
  int64_t steps = 0;
  double tolerance = 0;       ///< of gradients and weights
  double loss_tolerance = 0;
  std::vector<VerifyRow> rows;
  bool ok() const;
};

/// Layouts apart by ";", settings by ",": "dp=2; tp=2; dp_shard=2,zero=3,tp=2". Short names dp, tp, zero, dp_shard,
/// sequence_parallel, reshard_after_forward, reshard_group, prefetch, micro_batch, or any key of the configuration. Without dp there
/// are dp_shard data-parallel ranks, or one. ConfigError names what is not understood.
std::vector<std::string> split_layouts(const std::string& text);

/// Trains options.steps steps of `config` on one rank and on each of `layouts`, with ranks that are threads of this process, and
/// compares losses, norms, every gradient and the weights, all as whole tensors. The run folder is not touched. AdamW's eps is at
/// least 1e-6, below fp64 1e-4, so that gradients that are zero but for rounding (of a key's bias) do not move weights. ConfigError when `config`
/// itself cannot be trained on one rank; a layout that fails is a row.
VerifyReport verify(config::RunConfig config, const std::vector<std::string>& layouts, const VerifyOptions& options = {});

/// A table with a line per layout and a verdict.
std::string to_text(const VerifyReport& report);
std::string to_json(const VerifyReport& report);

}  // namespace weft::train
