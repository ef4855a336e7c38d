#include "weft/train/metrics.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

namespace weft::train {

std::string to_json(const memory::Amounts& amounts) {
  nlohmann::ordered_json json;
  for (size_t i = 0; i < amounts.size(); ++i) json[memory::name_of(static_cast<memory::Category>(i))] = amounts[i];
  return json.dump();
}

std::string to_json(const StepRecord& r) {
  nlohmann::ordered_json json{{"step", r.step}, {"loss", r.loss}};
  json["val_loss"] = r.val_loss ? nlohmann::ordered_json(*r.val_loss) : nlohmann::ordered_json(nullptr);
  json["val_loss_ema"] = r.val_loss_ema ? nlohmann::ordered_json(*r.val_loss_ema) : nlohmann::ordered_json(nullptr);
  json.update({{"tokens_per_s", r.tokens_per_s},
               {"grad_norm", r.grad_norm},
               {"lr", r.lr},
               {"tokens", r.tokens},
               {"epoch", r.epoch},
               {"step_s", r.step_s},
               {"elapsed_s", r.elapsed_s}});
  json["skipped"] = r.skipped;
  json["loss_scale"] = r.loss_scale ? nlohmann::ordered_json(*r.loss_scale) : nlohmann::ordered_json(nullptr);
  json["bubble"] = r.bubble ? nlohmann::ordered_json(*r.bubble) : nlohmann::ordered_json(nullptr);
  json["memory"] = r.memory ? nlohmann::ordered_json::parse(to_json(*r.memory)) : nlohmann::ordered_json(nullptr);
  return json.dump();
}

std::string short_number(double value) {
  const char* units[] = {"", "k", "M", "G", "T"};
  size_t unit = 0;
  while (std::abs(value) >= 999.5 && unit + 1 < std::size(units)) {
    value /= 1000;
    ++unit;
  }
  return fmt::format("{:.3g}{}", value, units[unit]);
}

std::string clock_time(double seconds) {
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  const int64_t hours = whole / 3600, minutes = whole / 60 % 60, rest = whole % 60;
  return hours > 0 ? fmt::format("{}:{:02}:{:02}", hours, minutes, rest) : fmt::format("{}:{:02}", minutes, rest);
}

std::string to_line(const StepRecord& r, int64_t total_steps, std::optional<double> seconds_left) {
  std::string line = fmt::format("step {}/{}  loss {:.4f}", r.step, total_steps, r.loss);
  if (r.val_loss) line += fmt::format("  val {:.4f}", *r.val_loss);
  if (r.val_loss_ema) line += fmt::format(" (averaged weights {:.4f})", *r.val_loss_ema);
  line += fmt::format("  {} tok/s  grad {:.3g}  lr {:.2e}", short_number(r.tokens_per_s), r.grad_norm, r.lr);
  if (r.skipped) line += "  skipped: fp16 overflow";
  if (seconds_left) line += fmt::format("  left {}", clock_time(*seconds_left));
  return line;
}

}  // namespace weft::train
