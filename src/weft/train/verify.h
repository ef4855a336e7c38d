// The same training steps under several layouts, compared with one rank.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "weft/comm/world.h"
#include "weft/config/run_config.h"
#include "weft/train/layout_text.h"
#include "weft/train/learner.h"
#include "weft/train/verify_report.h"

namespace weft::train {

struct VerifyOptions {
  int64_t steps = 3;
  double tolerance = 0;  ///< largest relative difference that is rounding; 0: as make_report()
  /// Called on every rank when its model is built, before the first step: faults that tests must see found.
  std::function<void(Learner&, const World&)> on_built;
  /// Called on every rank after each update, to the same end.
  std::function<void(Learner&, const World&)> on_step;
};

/// Trains options.steps steps of `config` on one rank and on each of `layouts` (split_layouts()), with ranks that are threads of this process, and
/// compares losses, norms, every gradient and the weights, all as whole tensors. The run folder is not touched. AdamW's eps is at
/// least 1e-6, below fp64 1e-4, so that gradients that are zero but for rounding (of a key's bias) do not move weights. ConfigError when `config`
/// itself cannot be trained on one rank; a layout that fails is a row.
VerifyReport verify(config::RunConfig config, const std::vector<std::string>& layouts, const VerifyOptions& options = {});

}  // namespace weft::train
