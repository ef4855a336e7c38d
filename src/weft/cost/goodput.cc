#include "weft/cost/goodput.h"

#include <cmath>

namespace weft::cost {

double young_interval(double save, double failure) { return std::sqrt(2 * save * failure); }

double daly_interval(double save, double failure) {
  const double ratio = save / (2 * failure);
  return std::sqrt(2 * save * failure) * (1 + std::sqrt(ratio) / 3 + ratio / 9) - save;
}

double effective_time(double interval, double save, double restart, double failure) { return 1 / (1 + save / interval + (restart + interval / 2 + save) / failure); }

double mean_time_to_failure(double devices, double device_mttf) { return device_mttf / devices; }

double device_hours(double flops, double rate) { return flops / rate / 3600; }

double compute_optimal_tokens(double parameters) { return 20 * parameters; }

double expected_maximum(double n) {
  if (n <= 1) return 0;
  const double z = std::sqrt(2 * std::log(n));
  constexpr double kLogFourPi = 2.5310242469692907;
  return z - (std::log(std::log(n)) + kLogFourPi) / (2 * z);
}

}  // namespace weft::cost
