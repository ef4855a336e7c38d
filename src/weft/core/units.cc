#include "weft/core/units.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <span>

namespace weft {
namespace {

/// Three significant digits without trailing zeros and without exponents below a million: 1.3, 412, 0.05.
std::string digits(double value) {
  const double magnitude = std::fabs(value);
  if (magnitude >= 100 || value == std::floor(value)) return fmt::format("{:.0f}", value);
  return fmt::format("{:.3g}", value);
}

struct Scaled {
  double value;
  size_t step;
};

/// Divides by `base` until the rounded number has at most `base`'s digits: 1023.9 MiB becomes 1 GiB, not 1024 MiB.
Scaled scale(double value, double base, size_t steps) {
  size_t step = 0;
  while (std::fabs(value) >= base - 0.5 && step + 1 < steps) {
    value /= base;
    ++step;
  }
  return {value, step};
}

std::string scaled_text(double value, double base, std::span<const char* const> units) {
  if (!std::isfinite(value)) return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  const Scaled s = scale(value, base, units.size());
  const std::string unit = units[s.step];
  return digits(s.value) + (unit.empty() ? "" : " " + unit);
}

}  // namespace

std::string bytes_text(double bytes) {
  static constexpr std::array units{"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  return scaled_text(bytes, 1024, units);
}

std::string count_text(double count) {
  static constexpr std::array units{"", "K", "M", "B", "T"};
  return scaled_text(count, 1000, units);
}

std::string rate_text(double per_second, const std::string& what) {
  return count_text(per_second) + " " + what + "/s";
}

std::string bandwidth_text(double bytes_per_second) {
  static constexpr std::array units{"B/s", "KB/s", "MB/s", "GB/s", "TB/s"};
  return scaled_text(bytes_per_second, 1000, units);
}

std::string flops_text(double flops) {
  static constexpr std::array units{"FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP", "YFLOP"};
  return scaled_text(flops, 1000, units);
}

std::string seconds_text(double seconds) {
  if (!std::isfinite(seconds)) return std::isnan(seconds) ? "nan" : seconds > 0 ? "forever" : "-forever";
  if (seconds < 0) return "-" + seconds_text(-seconds);
  if (seconds == 0) return "0 s";
  if (seconds < 0.9995e-3) return digits(seconds * 1e6) + " us";
  if (seconds < 0.9995) return digits(seconds * 1e3) + " ms";
  if (seconds < 59.95) return digits(seconds) + " s";
  struct Pair {
    const char* big;
    int64_t big_seconds;
    const char* small;
    int64_t small_seconds;
  };
  static constexpr std::array pairs{Pair{"min", 60, "s", 1}, Pair{"h", 3600, "min", 60}, Pair{"d", 86400, "h", 3600}};
  for (size_t i = 0; i < pairs.size(); ++i) {
    const Pair& pair = pairs[i];
    const int64_t total = std::llround(seconds / static_cast<double>(pair.small_seconds)) * pair.small_seconds;
    if (i + 1 < pairs.size() && total >= pairs[i + 1].big_seconds) continue;
    const int64_t small = total % pair.big_seconds / pair.small_seconds;
    const std::string big = fmt::format("{} {}", total / pair.big_seconds, pair.big);
    return small == 0 ? big : fmt::format("{} {} {}", big, small, pair.small);
  }
  return {};
}

std::vector<int64_t> divisors(int64_t n) {
  std::vector<int64_t> list;
  for (int64_t d = 1; d <= n; ++d) {
    if (n % d == 0) list.push_back(d);
  }
  return list;
}

}  // namespace weft
