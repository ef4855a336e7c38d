#include <algorithm>
#include <cmath>
#include <numbers>

#include "weft/optim/optim.h"

namespace weft::optim {

double LearningRate::at(int64_t update) const {
  if (update < warmup) return peak * static_cast<double>(update + 1) / static_cast<double>(warmup);
  if (kind == Kind::constant) return peak;
  if (kind == Kind::inverse_sqrt) {
    const auto from = static_cast<double>(std::max<int64_t>(warmup, 1));
    return peak * std::max(std::sqrt(from / (from + static_cast<double>(update - warmup))), final_ratio);
  }
  if (kind == Kind::wsd) {
    const double done = static_cast<double>(update - (total - decay)) / static_cast<double>(std::max<int64_t>(decay, 1));
    return peak * (1.0 - (1.0 - final_ratio) * std::clamp(done, 0.0, 1.0));
  }
  const double span = static_cast<double>(std::max<int64_t>(total - warmup, 1));
  const double done = std::min(static_cast<double>(update - warmup) / span, 1.0);
  const double left = kind == Kind::linear ? 1.0 - done : 0.5 * (1.0 + std::cos(std::numbers::pi * done));
  return peak * (final_ratio + (1.0 - final_ratio) * left);
}

void set_learning_rate(torch::optim::Optimizer& optimizer, double rate, const std::vector<double>& factors) {
  auto& groups = optimizer.param_groups();
  for (size_t i = 0; i < groups.size(); ++i) groups[i].options().set_lr(factors.empty() ? rate : rate * factors.at(i));
}

}  // namespace weft::optim
