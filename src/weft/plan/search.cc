#include "weft/plan/search.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <tuple>

#include "weft/core/error.h"
#include "weft/layout/part.h"
#include "weft/plan/simulate.h"

namespace weft::plan {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;
/// Ranked layouts that a result keeps; more than anybody reads.
constexpr size_t kKeep = 200;
/// Micro-batches beyond this many sequences only cost memory: products are full long before.
constexpr int64_t kLargestMicroBatch = 16;
/// Context parallelism is offered from this many tokens on: below, ring steps are shorter than their latency.
constexpr int64_t kContextParallelFrom = 8192;

using layout::Layout;
using layout::Recompute;

std::vector<int64_t> values(const std::vector<int64_t>& asked, const std::vector<int64_t>& all) {
  if (asked.empty()) return all;
  std::vector<int64_t> out;
  for (int64_t value : all)
    if (std::find(asked.begin(), asked.end(), value) != asked.end()) out.push_back(value);
  return out;
}

/// Interleaving: chunk counts that divide a stage's layers, up to one layer per chunk; eight are enough.
std::vector<int64_t> chunk_counts(int64_t layers, int64_t pp) {
  if (pp == 1) return {1};
  std::vector<int64_t> out;
  for (int64_t v = 1; v <= 8 && pp * v <= layers; ++v)
    if (v == 1 || layers % (pp * v) == 0 || (layers + 2) % (pp * v) == 0) out.push_back(v);
  return out;
}

/// Calls `visit` for every legal layout of the request.
class Space {
 public:
  explicit Space(const SearchRequest& request) : request_(request) {
    const model::BlockSpec& block = request.spec.blocks.back();
    experts_ = block.moe ? block.moe->experts : 1;
  }

  template <typename Visit>
  void each(Visit&& visit) const {
    for (int64_t tp : values(request_.tp, layout::divisors(request_.devices))) {
      if (tp > request_.machine.link_domain || !tp_fits(tp)) continue;
      for (int64_t pp : values(request_.pp, layout::divisors(request_.devices / tp))) {
        if (pp > request_.spec.layers()) continue;
        for (int64_t cp : values(request_.cp, layout::divisors(request_.devices / tp / pp))) {
          if (cp > 1 && (request_.sequence < kContextParallelFrom || request_.sequence / cp < kContextParallelFrom / 4 || request_.sequence % (2 * cp) != 0)) continue;
          Layout layout;
          layout.tp = tp, layout.pp = pp, layout.cp = cp;
          layout.dp = request_.devices / (tp * pp * cp);
          layout.sequence_parallel = tp > 1;
          layout.global_batch = request_.global_batch;
          with_batches(layout, visit);
        }
      }
    }
  }

 private:
  /// Heads that do not divide are legal and slow: only where they are asked for.
  bool tp_fits(int64_t tp) const {
    const model::AttentionSpec& attention = request_.spec.blocks.front().attention;
    return layout::heads_fit(attention, tp) && (attention.heads % tp == 0 || !request_.tp.empty());
  }
  template <typename Visit>
  void with_batches(Layout layout, Visit&& visit) const {
    if (request_.global_batch % layout.dp != 0) return;
    const int64_t per_replica = request_.global_batch / layout.dp;
    for (int64_t micro : values(request_.micro_batch, layout::divisors(per_replica))) {
      if (micro > kLargestMicroBatch) break;
      layout.micro_batch = micro;
      for (int64_t chunks : chunk_counts(request_.spec.layers(), layout.pp)) {
        if (chunks > 1 && (per_replica / micro) % layout.pp != 0) continue;
        layout.chunks = chunks;
        with_experts(layout, visit);
      }
    }
  }

  template <typename Visit>
  void with_experts(Layout layout, Visit&& visit) const {
    const std::vector<int64_t> degrees = experts_ > 1 ? layout::divisors(experts_) : std::vector<int64_t>{1};
    for (int64_t ep : values(request_.ep, degrees)) {
      if ((layout.dp * layout.cp * layout.tp) % ep != 0) continue;
      layout.ep = ep;
      with_strategy(layout, visit);
    }
  }

  template <typename Visit>
  void with_strategy(Layout layout, Visit&& visit) const {
    for (int zero : {0, 1, 2, 3}) {
      if (zero == 2 && request_.zero.empty()) continue;  // between 1 and 3 in memory and time: of interest to those who ask for it
      if (!request_.zero.empty() && std::find(request_.zero.begin(), request_.zero.end(), zero) == request_.zero.end()) continue;
      const int64_t replicas = layout.dp * layout.cp;
      if (zero > 0 && replicas == 1) continue;
      if (zero == 3 && layout.pp > 1) continue;  // gathers per micro-batch and stage: never faster than stage 1 there
      layout.zero = zero;
      for (int64_t group : {int64_t{0}, request_.machine.link_domain / layout.tp}) {
        if (group > 0 && (zero != 3 || group <= 1 || group >= replicas || replicas % group != 0)) continue;
        layout.shard_group = group;
        for (Recompute recompute : {Recompute::none, Recompute::half, Recompute::full}) {
          layout.recompute = recompute;
          for (const std::string& schedule : request_.schedules) {
            // A V of two chunks, a split backward over one: other combinations are not schedules of their own.
            const bool plain = schedule == "1f1b";
            if (!plain && (layout.pp == 1 || layout.chunks != (schedule == "zb-v" ? 2 : 1))) continue;
            layout.schedule = schedule;
            visit(layout);
          }
        }
      }
    }
  }

  const SearchRequest& request_;
  int64_t experts_ = 1;
};

using Strategy = std::tuple<int64_t, int64_t, int64_t, int>;
Strategy strategy_of(const Layout& layout) { return {layout.tp, layout.pp, layout.cp, layout.zero}; }

std::string reason_of(const Memory& memory, double over) {
  const std::pair<double, const char*> parts[] = {{memory.weights, "weights"}, {memory.gradients, "gradients"}, {memory.optimizer, "optimizer state"},
                                                  {memory.activations, "activations"}, {memory.logits, "logits"}, {memory.transient, "buffers in flight"}};
  const auto largest = *std::max_element(std::begin(parts), std::end(parts));
  return fmt::format("stage {} over by {:.1f} GiB: {:.1f} of {:.1f} GiB are {}", memory.stage, over, largest.first / kGiB, memory.needed() / kGiB, largest.second);
}

/// Bytes beyond the device for which the probability of fitting is at least `probability`.
double over_bytes(const Memory& memory, double capacity, const SearchRequest& request, const cost::Tuning& tuning) {
  if (fit_probability(memory.needed(), capacity, tuning.fit_sigma) >= request.fit_probability) return 0;
  // The quantile of the normal distribution by bisection on the needed size.
  double low = 0, high = memory.needed();
  for (int i = 0; i < 40; ++i) {
    const double middle = (low + high) / 2;
    (fit_probability(middle, capacity, tuning.fit_sigma) >= request.fit_probability ? low : high) = middle;
  }
  return memory.needed() - low;
}

double tokens_per_second(const SearchRequest& request, const Time& time) { return static_cast<double>(request.global_batch * request.sequence) / time.step; }

bool better(const Candidate& a, const Candidate& b, Objective objective) {
  if (objective == Objective::memory) return a.memory.device() < b.memory.device();
  return a.time.step < b.time.step;
}

/// Simulates the pipelines of the fastest candidates, as many as the budget allows, and puts everything in order again.
int64_t simulate_best(std::vector<Candidate>& sorted, Job job, const SearchRequest& request, const cost::Tuning& tuning) {
  double budget = request.simulate_actions;
  int64_t simulated = 0;
  for (size_t i = 0; i < std::min(sorted.size(), kKeep); ++i) {
    Candidate& candidate = sorted[i];
    if (candidate.layout.pp == 1) continue;
    budget -= simulated_actions(candidate.layout);
    if (budget < 0) break;
    job.layout = candidate.layout;
    candidate.time = simulated_time(job, tuning);
    candidate.tokens_per_second = tokens_per_second(request, candidate.time);
    candidate.simulated = true;
    ++simulated;
  }
  std::stable_sort(sorted.begin(), sorted.end(), [&](const Candidate& a, const Candidate& b) { return better(a, b, request.objective); });
  return simulated;
}

std::vector<Candidate> pareto_of(std::vector<Candidate> all) {
  std::sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) { return a.time.step < b.time.step; });
  std::vector<Candidate> front;
  for (const Candidate& candidate : all)
    if (front.empty() || candidate.memory.device() < front.back().memory.device() * 0.98) front.push_back(candidate);
  return front;
}

/// The cheapest single change of a layout that does not fit: the fastest fitting layout that differs in one decision.
std::string nearest_change(const Layout& wrong, const std::vector<Candidate>& fitting, double best_step) {
  const Candidate* nearest = nullptr;
  std::string what;
  for (const Candidate& candidate : fitting) {
    const Layout& other = candidate.layout;
    std::vector<std::string> differences;
    if (other.tp != wrong.tp) differences.push_back(fmt::format("tp {}", other.tp));
    if (other.pp != wrong.pp) differences.push_back(fmt::format("pp {}", other.pp));
    if (other.cp != wrong.cp) differences.push_back(fmt::format("cp {}", other.cp));
    if (other.zero != wrong.zero) differences.push_back(fmt::format("zero {}", other.zero));
    if (other.recompute != wrong.recompute) differences.push_back(fmt::format("recompute {}", layout::recompute_name(other.recompute)));
    if (other.micro_batch != wrong.micro_batch) differences.push_back(fmt::format("micro-batch {}", other.micro_batch));
    if (other.schedule != wrong.schedule) differences.push_back("schedule " + other.schedule);
    if (other.offload != wrong.offload) differences.push_back(other.offload ? "offload" : "no offload");
    if (other.ep != wrong.ep) differences.push_back(fmt::format("ep {}", other.ep));
    if (differences.size() == 1 && (nearest == nullptr || candidate.time.step < nearest->time.step)) nearest = &candidate, what = differences[0];
  }
  if (nearest == nullptr) return "";
  return fmt::format("{}: fits with {:.1f} GiB, {:.0f}% slower than the best", what, nearest->memory.device() / kGiB, 100 * (nearest->time.step / best_step - 1));
}

}  // namespace

Findings check(const SearchRequest& request) {
  Findings findings;
  if (request.devices < 1) findings.add("devices", fmt::format("{}; the rule is devices >= 1", request.devices), "for one node use " + std::to_string(request.machine.node_devices));
  if (request.global_batch < 1) findings.add("batch", fmt::format("{} sequences; the rule is batch >= 1", request.global_batch), "give the global batch in sequences");
  if (request.sequence < 1) findings.add("seq", fmt::format("{} tokens; the rule is seq >= 1", request.sequence), "give the sequence length in tokens");
  if (request.spec.blocks.empty()) findings.add("model", "has no blocks", "give layers >= 1");
  if (!findings.empty()) return findings;
  const auto divides = [&](const char* name, const std::vector<int64_t>& degrees, int64_t whole, const std::string& of) {
    for (int64_t degree : degrees)
      if (degree < 1 || whole % degree != 0) findings.add(name, fmt::format("{} does not divide {} {}", degree, whole, of), fmt::format("{} = {}", name, layout::nearest_divisors(whole, degree)));
  };
  divides("tp", request.tp, request.devices, "devices");
  for (const int64_t tp : request.tp) layout::check_tp_ranks(request.spec, tp, "tp", findings);
  divides("pp", request.pp, request.devices, "devices");
  divides("cp", request.cp, request.devices, "devices");
  for (const std::string& schedule : request.schedules)
    if (schedule != "1f1b" && schedule != "zb-h1" && schedule != "zb-v") findings.add("schedule", "\"" + schedule + "\" is not searched", "use 1f1b, zb-h1 or zb-v");
  if (std::find(request.schedules.begin(), request.schedules.end(), "1f1b") == request.schedules.end() && request.pp.empty())
    findings.add("schedule", "without 1f1b only pipelines are left", "add 1f1b, or give --pp");
  for (int64_t pp : request.pp)
    if (pp > request.spec.layers()) findings.add("pp", fmt::format("{} stages for {} layers", pp, request.spec.layers()), fmt::format("pp <= {}", request.spec.layers()));
  return findings;
}

SearchResult search(const SearchRequest& request, const cost::Tuning& tuning) {
  check(request).throw_if_any("the plan request");
  const auto start = std::chrono::steady_clock::now();
  SearchResult result;
  Job job;
  job.model = ModelSummary::of(request.spec, request.sequence);
  job.machine = request.machine;
  job.software = request.software;
  job.precision = request.precision;
  job.sequence = request.sequence;
  const double capacity = request.machine.device.memory_gib * kGiB;
  const double least = request.objective == Objective::balanced ? 0.99 : request.fit_probability;
  std::vector<Candidate> fitting;
  struct Loser {
    Layout layout;
    Memory memory;
  };
  std::map<Strategy, Loser> losers;
  std::map<Strategy, bool> fits;
  bool host_short = false;
  Space(request).each([&](Layout layout) {
    ++result.considered;
    job.layout = layout;
    Memory memory = peak_memory(job, tuning);
    if (memory.fit_probability < least && request.offload && layout.zero < 3) {
      job.layout.offload = true;
      const Memory offloaded = peak_memory(job, tuning);
      if (host_fits(offloaded, job)) layout.offload = true, memory = offloaded;
      else host_short = true;
    }
    const Strategy strategy = strategy_of(layout);
    if (memory.fit_probability < least) {
      auto [found, fresh] = losers.try_emplace(strategy, Loser{layout, memory});
      if (!fresh && memory.device() < found->second.memory.device()) found->second = {layout, memory};
      return;
    }
    fits[strategy] = true;
    const Time time = step_time(job, tuning);
    fitting.push_back({layout, memory, time, tokens_per_second(request, time)});
  });
  if (result.considered == 0)
    throw ConfigError(fmt::format("no layout divides {} devices, {} heads, {} layers and a batch of {} sequences; use a batch that is a multiple of the device count",
                                  request.devices, request.spec.blocks.front().attention.heads, request.spec.layers(), request.global_batch));
  result.host_short = host_short;
  result.fitting = static_cast<int64_t>(fitting.size());
  std::sort(fitting.begin(), fitting.end(), [&](const Candidate& a, const Candidate& b) { return better(a, b, request.objective); });
  result.simulated = simulate_best(fitting, job, request, tuning);
  const double best_step = fitting.empty() ? 1 : fitting.front().time.step;
  for (const auto& [strategy, loser] : losers) {
    if (fits.count(strategy) > 0) continue;
    const double over = over_bytes(loser.memory, capacity, request, tuning);
    result.rejected.push_back({loser.layout, loser.memory, over / kGiB, reason_of(loser.memory, over / kGiB), nearest_change(loser.layout, fitting, best_step)});
  }
  std::sort(result.rejected.begin(), result.rejected.end(), [](const Rejection& a, const Rejection& b) { return a.over_gib < b.over_gib; });
  result.pareto = pareto_of(fitting);
  fitting.resize(std::min(fitting.size(), kKeep));
  result.ranked = std::move(fitting);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace weft::plan
