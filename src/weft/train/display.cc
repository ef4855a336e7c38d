#include "weft/train/display.h"

#include <numeric>

namespace weft::train {
namespace {

/// Steps over which speed and time left are averaged.
constexpr size_t kWindow = 32;

}  // namespace

void StepDisplay::show(const StepRecord& record) {
  recent_s_.push_back(record.step_s);
  if (recent_s_.size() > kWindow) recent_s_.pop_front();
  const double mean_s =
      std::accumulate(recent_s_.begin(), recent_s_.end(), 0.0) / static_cast<double>(recent_s_.size());
  StepRecord shown = record;
  shown.tokens_per_s = record.tokens_per_s * record.step_s / mean_s;
  const std::string text = to_line(shown, total_, static_cast<double>(total_ - record.step) * mean_s);
  if (record.val_loss || record.step == total_) {
    line_.keep(text);
  } else {
    line_.show(text);
  }
}

}  // namespace weft::train
