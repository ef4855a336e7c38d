#include "weft/train/verify_report.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "weft/core/error.h"
#include "weft/train/training_trace.h"

namespace weft {
namespace {

double finite(double value) { return std::isfinite(value) ? value : std::numeric_limits<double>::infinity(); }

double scalar_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double worst = 0;
  for (size_t i = 0; i < b.size(); ++i) worst = std::max(worst, finite(std::abs(a[i] - b[i]) / std::max(std::abs(b[i]), 1e-300)));
  return worst;
}

double tensor_difference(const at::Tensor& a, const at::Tensor& b, double floor) {
  if (a.defined() != b.defined() || (a.defined() && a.sizes() != b.sizes())) return std::numeric_limits<double>::infinity();
  if (!b.defined() || b.numel() == 0) return 0;
  return finite((a - b).abs().max().item<double>() / std::max(b.abs().max().item<double>(), floor));
}

/// Compares two lists by name; `first` becomes the first tensor that is further off than `tolerance`, if it is empty.
double compare_tensors(const char* what, const std::vector<NamedTensor>& found, const std::vector<NamedTensor>& expected, double floor, double tolerance,
               std::string& first) {
  double worst = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    // Usually in the same place; pipeline ranks list theirs one after the other.
    auto same = found.begin() + static_cast<std::ptrdiff_t>(std::min(i, found.size()));
    if (same == found.end() || same->name != expected[i].name) {
      same = std::find_if(found.begin(), found.end(), [&](const NamedTensor& t) { return t.name == expected[i].name; });
    }
    const double difference = same != found.end() ? tensor_difference(same->tensor, expected[i].tensor, floor) : std::numeric_limits<double>::infinity();
    if (!(difference <= tolerance) && first.empty()) first = fmt::format("{} of {}", what, expected[i].name);
    worst = std::max(worst, difference);
  }
  return worst;
}

/// The first copies that are further apart than `tolerance`, if `first` is empty. what: "copies", or which of them.
void compare_copies(const char* what, const std::vector<train::CopyDifference>& copies, double tolerance, std::string& first) {
  for (const train::CopyDifference& copy : copies) {
    if (first.empty() && !(copy.difference <= tolerance)) {
      first = fmt::format("{} of {} on {} ranks, which differ by {:.1e}", what, copy.name, copy.axis, copy.difference);
    }
  }
}

}  // namespace

namespace train {

VerifyReport make_report(const std::string& dtype, int64_t steps, double tolerance) {
  const bool fp64 = dtype == "fp64", fp32 = dtype == "fp32";
  return {.dtype = dtype,
          .steps = steps,
          .tolerance = tolerance > 0 ? tolerance : fp64 ? 1e-10 : fp32 ? 5e-4 : 5e-2,
          .loss_tolerance = tolerance > 0 ? tolerance : fp64 ? 1e-10 : fp32 ? 1e-5 : 5e-2,
          .rows = {}};
}

void compare(const TrainingTrace& trace, const TrainingTrace& reference, double rate, const VerifyReport& report, VerifyRow& row) {
  // A gradient that is zero but for rounding is not to be compared digit by digit.
  const double share = report.dtype == "fp64" ? 1e-6 : 1e-3;
  double largest = 0;
  for (const NamedTensor& g : reference.gradients) largest = std::max(largest, g.tensor.defined() ? g.tensor.norm().item<double>() : 0.0);
  row.loss = scalar_difference(trace.losses, reference.losses);
  row.norm = scalar_difference(trace.norms, reference.norms);
  // Start values are not computed, and must be equal.
  compare_tensors("start values", trace.starts, reference.starts, rate, 0, row.first);
  compare_copies("start values", trace.start_copies, 0, row.first);
  row.gradient = compare_tensors("gradient", trace.gradients, reference.gradients, share * largest, report.tolerance, row.first);
  compare_copies("copies", trace.copies, report.tolerance, row.first);
  if (!(row.norm <= report.tolerance) && row.first.empty()) row.first = "gradient norm";
  if (!(trace.norm_spread <= report.tolerance) && row.first.empty()) row.first = "gradient norm, which differs between ranks";
  row.weight = compare_tensors("weights", trace.weights, reference.weights, rate, report.tolerance, row.first);
  if (!(row.loss <= report.loss_tolerance)) row.first = row.first.empty() ? "loss" : row.first + ", and the loss";
}

void fail(VerifyRow& row, const std::string& why) {
  row.loss = row.norm = row.gradient = row.weight = std::numeric_limits<double>::infinity();
  row.first = why;
}

void check_alive(const TrainingTrace& reference) {
  const double norm = reference.norms.front();
  if (!(norm > 0) || !std::isfinite(norm)) {
    throw ConfigError(fmt::format("on one rank the gradient norm of the first step is {}: every layout would agree with a model that does not learn", norm));
  }
  for (size_t i = 0; i < reference.weights.size(); ++i) {
    if (!at::equal(reference.weights[i].tensor, reference.starts[i].tensor)) return;
  }
  throw ConfigError("on one rank no weight has moved: every layout would agree with a model that does not learn");
}

OneThread::OneThread() : before_(at::get_num_threads()) { at::set_num_threads(1); }
OneThread::~OneThread() { at::set_num_threads(before_); }

}  // namespace train

bool VerifyReport::ok() const {
  return std::all_of(rows.begin(), rows.end(), [](const VerifyRow& row) { return row.ok(); });
}

std::string to_text(const VerifyReport& report) {
  size_t width = 8;
  for (const VerifyRow& row : report.rows) width = std::max(width, row.layout.size());
  std::string text = fmt::format("{:{}}  ranks       loss       norm   gradient     weight\n", "layout", width);
  for (const VerifyRow& row : report.rows) {
    text += fmt::format("{:{}}  {:5}  {:9.1e}  {:9.1e}  {:9.1e}  {:9.1e}  {}\n", row.layout, width, row.ranks, row.loss, row.norm, row.gradient,
                        row.weight, row.ok() ? "ok" : "OUT: " + row.first);
  }
  return text + fmt::format("largest relative differences from one rank over {} steps in {}; tolerance {:.0e}, losses {:.0e}\n", report.steps,
                            report.dtype, report.tolerance, report.loss_tolerance);
}

std::string to_json(const VerifyReport& report) {
  const auto number = [](double value) { return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr); };
  nlohmann::ordered_json json{{"ok", report.ok()}, {"dtype", report.dtype}, {"steps", report.steps}, {"tolerance", report.tolerance},
                              {"loss_tolerance", report.loss_tolerance}};
  for (const VerifyRow& row : report.rows) {
    json["layouts"].push_back({{"layout", row.layout}, {"ranks", row.ranks}, {"ok", row.ok()}, {"loss", number(row.loss)},
                               {"norm", number(row.norm)}, {"gradient", number(row.gradient)}, {"weight", number(row.weight)}, {"first", row.first}});
  }
  return json.dump(2);
}

}  // namespace weft
