#include "weft/train/offload_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "weft/core/units.h"
#include "weft/cost/offload.h"
#include "weft/machine/local.h"

namespace weft::train {
namespace {

/// Of the processor, whatever accelerators the machine has: the update runs on it.
double memory_rate() {
  machine::LocalComputer computer = machine::detect_local();
  computer.gpus.clear();
  return 1e12 * machine::machine_of(computer).device.memory_tbps;
}

std::string cost_text(const OffloadCost& cost) {
  return fmt::format("{} moved, {:.3g} s, {:.3g} s of it waiting for the disk", bytes_text(cost.bytes), cost.step_s, cost.waited_s);
}

nlohmann::ordered_json cost_json(const OffloadCost& cost) {
  return {{"bytes", cost.bytes}, {"step_s", cost.step_s}, {"waited_s", cost.waited_s}};
}

}  // namespace

OffloadReport report_offload(const optim::OffloadUse& use) {
  OffloadReport report{.file_bytes = use.file_bytes, .buffer_bytes = use.buffer_bytes, .predicted = {}, .measured = {}};
  const auto state = static_cast<double>(use.file_bytes);
  const cost::OffloadBytes bytes{.in = state, .update = static_cast<double>(use.touched_bytes), .out = state};
  const cost::OffloadRates rates{.in = use.rates.read, .update = memory_rate(), .out = use.rates.write};
  if (use.file_bytes > 0) {
    report.predicted = {.bytes = 2 * state, .step_s = cost::offload_seconds(bytes, rates), .waited_s = cost::exposed_offload_seconds(bytes, rates)};
  }
  const auto steps = static_cast<double>(std::max<int64_t>(1, use.steps));
  report.measured = {.bytes = static_cast<double>(use.disk.bytes_read + use.disk.bytes_written) / steps,
                     .step_s = use.step_s / steps,
                     .waited_s = use.disk.waited_s / steps};
  return report;
}

std::string to_text(const OffloadReport& report) {
  return fmt::format("offload        {} of optimizer state on the disk, through {} of buffers (rank 0)\nper update     predicted: {}; measured: {}\n",
                     bytes_text(static_cast<double>(report.file_bytes)), bytes_text(static_cast<double>(report.buffer_bytes)),
                     cost_text(report.predicted), cost_text(report.measured));
}

std::string to_json(const OffloadReport& report) {
  return nlohmann::ordered_json{{"file_bytes", report.file_bytes}, {"buffer_bytes", report.buffer_bytes},
                                {"predicted", cost_json(report.predicted)}, {"measured", cost_json(report.measured)}}
      .dump();
}

}  // namespace weft::train
