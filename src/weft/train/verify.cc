#include "weft/train/verify.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "weft/config/parse.h"
#include "weft/core/cause.h"
#include "weft/core/error.h"
#include "weft/nn/placement.h"
#include "weft/parallel/whole.h"
#include "weft/train/weights.h"

namespace weft::train {
namespace {

/// Everything that a training run shows.
struct Trace {
  std::vector<double> losses, norms;
  std::vector<NamedTensor> starts, gradients, weights;
  std::vector<std::pair<std::string, double>> copies;  // of weights that several tensor-parallel ranks hold: how far they are apart
};

const std::map<std::string, std::string>& short_names() {
  static const std::map<std::string, std::string> names{
      {"dp", "layout.dp"}, {"tp", "layout.tp"}, {"zero", "parallel.zero"}, {"dp_shard", "parallel.dp_shard"},
      {"sequence_parallel", "parallel.sequence_parallel"}, {"reshard_after_forward", "parallel.reshard_after_forward"},
      {"reshard_group", "parallel.reshard_group"}, {"prefetch", "parallel.prefetch"}, {"micro_batch", "train.micro_batch"}};
  return names;
}

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\n"), last = text.find_last_not_of(" \t\n");
  return first == std::string::npos ? std::string() : text.substr(first, last - first + 1);
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(at, begin), text.size());
    if (std::string part = trimmed(text.substr(begin, end - begin)); !part.empty()) parts.push_back(std::move(part));
    begin = end + 1;
  }
  return parts;
}

/// `base` on one rank, then with the layout's settings.
config::RunConfig with_layout(config::RunConfig base, const std::string& layout) {
  Findings findings;
  base.layout.dp = 0;
  base.layout.tp = 1;
  base.parallel = {};
  for (const std::string& setting : split(layout, ',')) {
    const size_t equals = setting.find('=');
    const std::string name = trimmed(setting.substr(0, equals));
    const auto known = short_names().find(name);
    if (known == short_names().end() && name.find('.') == std::string::npos) {
      findings.add(name, fmt::format("in layout '{}' is no setting of a layout", layout), "dp, tp, zero, dp_shard, sequence_parallel, ... (weft verify --help)");
      continue;
    }
    const std::string value = equals == std::string::npos ? "" : trimmed(setting.substr(equals + 1));
    config::override_key(base, (known == short_names().end() ? name : known->second) + "=" + value, findings);
  }
  findings.throw_if_any("layout '" + layout + "'");
  if (base.layout.dp == 0) base.layout.dp = std::max<int64_t>(1, base.parallel.dp_shard);
  return base;
}

std::vector<NamedTensor> weights_of(Learner& learner, bool keep) {
  const auto full = learner.data_parallel().gather_full();
  std::vector<NamedTensor> weights = whole_weights(learner.model(), keep);
  for (NamedTensor& w : weights) w.tensor = w.tensor.detach().to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  return weights;
}

/// Of parallel/gradient_norm.cc.
constexpr double kClipEpsilon = 1e-6;

Trace trace_of(const Job& job, const World& world, const VerifyOptions& options) {
  const Axes axes = make_axes(job, world);
  Learner learner(job, axes);
  if (options.on_built) options.on_built(learner, world);
  const data::TrainBatches batches = train_batches(job, axes.dp);
  const bool keep = world.rank() == 0;
  Trace trace;
  trace.starts = weights_of(learner, keep);
  for (int64_t step = 0; step < options.steps; ++step) {
    const StepResult mine = learner.accumulate(batches, step);
    const at::Tensor loss = at::full({1}, mine.loss_sum, at::kDouble);
    axes.dp.all_reduce(loss).wait();
    trace.losses.push_back(loss.item<double>() / static_cast<double>(batches.tokens_per_step()));
    trace.norms.push_back(mine.grad_norm);
    if (step == 0) {
      // As before clipping, so that one wrong gradient does not change the others.
      const double clip = job.config.optimizer.clip_norm, share = clip > 0 ? clip / (mine.grad_norm + kClipEpsilon) : 1;
      for (NamedTensor& g : parallel::whole_gradients(learner.data_parallel())) {
        if (keep) trace.gradients.push_back({g.name, g.tensor.defined() ? g.tensor.to(at::kDouble) / std::min(share, 1.0) : g.tensor});
      }
    }
    learner.apply(job.config.optimizer.lr);
  }
  trace.weights = weights_of(learner, keep);
  const auto full = learner.data_parallel().gather_full();
  for (const auto& p : learner.model()->named_parameters()) {
    trace.copies.emplace_back(p.key(), nn::copy_difference(p.value(), nn::placement_of(p.value())));
  }
  return trace;
}

Trace run_layout(const config::RunConfig& config, const VerifyOptions& options) {
  const int ranks = static_cast<int>(config.layout.dp * config.layout.tp);
  const Job job = make_job(config, ranks);
  Trace first;
  WorldOptions world_options;
  world_options.timeout = std::chrono::seconds(config.layout.timeout_s);
  World::threads(ranks, [&](World& world) {
    Trace trace = trace_of(job, world, options);
    if (world.rank() == 0) first = std::move(trace);
  }, world_options);
  return first;
}

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

/// Compares two lists; `first` becomes the first tensor that is further off than `tolerance`, if it is empty.
double compare(const char* what, const std::vector<NamedTensor>& found, const std::vector<NamedTensor>& expected, double floor, double tolerance,
               std::string& first) {
  double worst = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const bool same = i < found.size() && found[i].name == expected[i].name;
    const double difference = same ? tensor_difference(found[i].tensor, expected[i].tensor, floor) : std::numeric_limits<double>::infinity();
    if (!(difference <= tolerance) && first.empty()) first = fmt::format("{} of {}", what, expected[i].name);
    worst = std::max(worst, difference);
  }
  return worst;
}

void compare(const Trace& trace, const Trace& reference, double rate, const VerifyReport& report, VerifyRow& row) {
  // A gradient that is zero but for rounding is not to be compared digit by digit.
  const double share = report.dtype == "fp64" ? 1e-6 : 1e-3;
  double largest = 0;
  for (const NamedTensor& g : reference.gradients) largest = std::max(largest, g.tensor.defined() ? g.tensor.norm().item<double>() : 0.0);
  row.loss = scalar_difference(trace.losses, reference.losses);
  row.norm = scalar_difference(trace.norms, reference.norms);
  // In the order in which a mistake shows. Start values are not computed, and must be equal.
  compare("start values", trace.starts, reference.starts, rate, 0, row.first);
  row.gradient = compare("gradient", trace.gradients, reference.gradients, share * largest, report.tolerance, row.first);
  for (const auto& [name, difference] : trace.copies) {
    if (!(difference <= report.tolerance) && row.first.empty()) row.first = "copies of " + name + " on tensor-parallel ranks, which differ";
  }
  if (!(row.norm <= report.tolerance) && row.first.empty()) row.first = "gradient norm";
  row.weight = compare("weights", trace.weights, reference.weights, rate, report.tolerance, row.first);
  if (!(row.loss <= report.loss_tolerance)) row.first = row.first.empty() ? "loss" : row.first + ", and the loss";
}

/// What a reference must show for agreement to mean anything.
void check_alive(const Trace& reference) {
  const double norm = reference.norms.front();
  if (!(norm > 0) || !std::isfinite(norm)) {
    throw ConfigError(fmt::format("on one rank the gradient norm of the first step is {}: every layout would agree with a model that does not learn", norm));
  }
}

/// Ranks are threads of this process, which share its cores.
class OneThread {
 public:
  OneThread() { at::set_num_threads(1); }
  ~OneThread() { at::set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_ = at::get_num_threads();
};

}  // namespace

bool VerifyReport::ok() const {
  return std::all_of(rows.begin(), rows.end(), [](const VerifyRow& row) { return row.ok(); });
}

std::vector<std::string> split_layouts(const std::string& text) {
  std::vector<std::string> layouts = split(text, ';');
  if (layouts.empty()) throw ConfigError("no layout is named; for instance --layouts \"dp=2; tp=2; dp_shard=2,zero=3,tp=2\"");
  for (const std::string& layout : layouts) with_layout({}, layout);
  return layouts;
}

VerifyReport verify(config::RunConfig config, const std::vector<std::string>& layouts, const VerifyOptions& options) {
  config.optimizer.eps = std::max(config.optimizer.eps, config.train.dtype == "fp64" ? 1e-6 : 1e-4);
  const OneThread threads;
  VerifyReport report{.dtype = config.train.dtype, .steps = options.steps};
  const bool fp64 = config.train.dtype == "fp64", fp32 = config.train.dtype == "fp32";
  report.tolerance = options.tolerance > 0 ? options.tolerance : fp64 ? 1e-10 : fp32 ? 5e-4 : 5e-2;
  report.loss_tolerance = options.tolerance > 0 ? options.tolerance : fp64 ? 1e-10 : fp32 ? 1e-5 : 5e-2;
  VerifyOptions plain = options;
  plain.on_built = nullptr;
  const Trace reference = run_layout(with_layout(config, ""), plain);
  check_alive(reference);
  for (const std::string& layout : layouts) {
    const config::RunConfig changed = with_layout(config, layout);
    VerifyRow row{.layout = layout, .ranks = static_cast<int>(changed.layout.dp * changed.layout.tp)};
    try {
      compare(run_layout(changed, options), reference, config.optimizer.lr, report, row);
    } catch (const std::exception& error) {
      row.loss = row.norm = row.gradient = row.weight = std::numeric_limits<double>::infinity();
      row.first = cause_text(error.what());
    }
    report.rows.push_back(std::move(row));
  }
  return report;
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

}  // namespace weft::train
