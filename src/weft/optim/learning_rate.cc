#include <algorithm>
#include <cmath>
#include <numbers>

#include "weft/optim/optim.h"

namespace weft::optim {

double LearningRate::at(int64_t update) const {
  if (update < warmup) return peak * static_cast<double>(update + 1) / static_cast<double>(warmup);
  if (kind == Kind::constant) return peak;
  const double span = static_cast<double>(std::max<int64_t>(total - warmup, 1));
  const double done = std::min(static_cast<double>(update - warmup) / span, 1.0);
  const double left = kind == Kind::linear ? 1.0 - done : 0.5 * (1.0 + std::cos(std::numbers::pi * done));
  return peak * (final_ratio + (1.0 - final_ratio) * left);
}

void set_learning_rate(torch::optim::Optimizer& optimizer, double rate) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(rate);
}

}  // namespace weft::optim
