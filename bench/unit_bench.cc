// What a Unit's gather and reduce-scatter cost under ZeRO-3, through the engine's own flat groups, beside a memcpy of the Unit's bytes
// by all ranks at the same time: what copying them could not be faster than. Ranks are processes of this machine. The three
// take turns, each on one Unit after the other, so that caches are as cold for one as for the others.
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>

#include "bench/support/own_ranks.h"
#include "weft/comm/world.h"
#include "weft/memory/cpu_allocator.h"
#include "weft/parallel/flat_group.h"

namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;
using weft::parallel::FlatGroup;
using weft::parallel::GradientPool;

constexpr int kUnits = 4;

struct Options {
  std::vector<int> ranks{2};
  std::vector<double> megabytes{1, 25, 100};
  int rounds = 40;
  std::string json;
};

/// Seconds from a barrier to the end of `body` on the slowest rank.
double timed(const weft::Comm& comm, const std::function<void()>& body) {
  comm.barrier();
  const auto start = Clock::now();
  body();
  const at::Tensor time = at::full({1}, std::chrono::duration<double>(Clock::now() - start).count(), at::kDouble);
  comm.all_reduce(time, weft::ReduceOp::max).wait();
  return *time.const_data_ptr<double>();
}

/// Units of one fp32 parameter, as DataParallel makes them.
class Units {
 public:
  Units(const weft::Comm& comm, int64_t numel) : comm_(comm), axes_(weft::parallel::make_data_axes(comm, 0, {})) {
    FlatGroup::Plan plan{.label = "unit", .residence = weft::parallel::Residence::released};
    for (int u = 0; u < kUnits; ++u) {
      at::Tensor parameter = at::randn({numel}, at::kFloat).requires_grad_(true);
      groups_.push_back(std::make_unique<FlatGroup>(plan, std::vector<weft::NamedTensor>{{"weight", parameter}}, axes_));
      groups_.back()->release();
    }
    pool_ = std::make_unique<GradientPool>(3, groups_[0]->gradient_bytes(), at::kCPU, axes_.shard, [] { return false; });
    source_ = at::randn({kUnits, numel}, at::kFloat);
    target_ = at::randn({numel}, at::kFloat);
  }

  double copy(int u) {
    return timed(comm_, [&] { std::memcpy(target_.mutable_data_ptr(), source_[u].const_data_ptr(), target_.nbytes()); });
  }
  double gather(int u) {
    FlatGroup& group = *groups_[static_cast<size_t>(u)];
    const double seconds = timed(comm_, [&] {
      group.start_gather();
      group.finish_gather();
    });
    group.release();
    group.settle();
    return seconds;
  }
  double reduce_scatter(int u) {
    FlatGroup& group = *groups_[static_cast<size_t>(u)];
    group.open_round();
    for (auto& slot : group.slots()) {  // the gradient has landed: it is in the flat buffer
      slot.parameter.mutable_grad() = source_[u];
      group.adopt(slot, *pool_);
      group.mark_ready(slot);
    }
    return timed(comm_, [&] {
      group.launch(*pool_, {.op = weft::ReduceOp::sum});
      group.collect();
    });
  }

 private:
  weft::Comm comm_;
  weft::parallel::DataAxes axes_;
  std::vector<std::unique_ptr<FlatGroup>> groups_;
  std::unique_ptr<GradientPool> pool_;
  at::Tensor source_, target_;
};

Json figures(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return {{"median_ms", times[times.size() / 2] * 1e3}, {"least_ms", times.front() * 1e3}};
}

void run_rank(const Options& options, const std::string& result_file) {
  weft::install_cpu_allocator();  // as the command does: a gather's buffer is not faulted in anew each time
  const at::NoGradGuard no_grad;
  const auto world = weft::World::init({.timeout = std::chrono::minutes(5)});
  std::ofstream result;
  if (world.rank() == 0) result.open(result_file);
  for (const double megabytes : options.megabytes) {
    Units units(world.comm(), static_cast<int64_t>(megabytes * 1e6 / 4));
    std::vector<double> copies, gathers, reductions;
    for (int i = 0; i < options.rounds + 1; ++i) {
      const int u = i % kUnits;
      const double copy = units.copy(u), gather = units.gather(u), reduction = units.reduce_scatter(u);
      if (i == 0) continue;
      copies.push_back(copy);
      gathers.push_back(gather);
      reductions.push_back(reduction);
    }
    if (!result.is_open()) continue;
    result << Json{{"ranks", world.size()}, {"megabytes", megabytes}, {"memcpy", figures(copies)}, {"gather", figures(gathers)}, {"reduce_scatter", figures(reductions)}} << std::endl;
  }
}

void run_all(const Options& options, const std::vector<std::string>& arguments) {
  fmt::print("ms on the slowest rank, median of {} rounds; ratio to the memcpy of a Unit's fp32 bytes by all ranks at once (of the medians, and of the least times)\n\n", options.rounds);
  fmt::print("{:>5} {:>9} | {:>8} | {:>8} {:>7} {:>7} | {:>14} {:>7} {:>7}\n", "ranks", "MB", "memcpy", "gather", "ratio", "least", "reduce-scatter", "ratio", "least");
  Json report = Json::array();
  for (const int ranks : options.ranks) {
    for (const Json& line : weft::bench::run_own_ranks(ranks, arguments)) {
      report.push_back(line);
      const auto of = [&](const char* what, const char* which) { return line[what][which].get<double>(); };
      const auto ratio = [&](const char* what, const char* which) { return of(what, which) / of("memcpy", which); };
      fmt::print("{:>5} {:>9.0f} | {:>8.3f} | {:>8.3f} {:>7.2f} {:>7.2f} | {:>14.3f} {:>7.2f} {:>7.2f}\n", ranks, line["megabytes"].get<double>(), of("memcpy", "median_ms"),
                 of("gather", "median_ms"), ratio("gather", "median_ms"), ratio("gather", "least_ms"),
                 of("reduce_scatter", "median_ms"), ratio("reduce_scatter", "median_ms"), ratio("reduce_scatter", "least_ms"));
    }
  }
  if (!options.json.empty()) std::ofstream(options.json) << report.dump(1) << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("A Unit's gather and reduce-scatter under ZeRO-3 against a memcpy of its bytes");
  app.add_option("--ranks", options.ranks, "Numbers of ranks")->delimiter(',')->capture_default_str();
  app.add_option("--megabytes", options.megabytes, "Sizes of a Unit's fp32 parameters")->delimiter(',')->capture_default_str();
  app.add_option("--rounds", options.rounds, "Rounds of all three")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--json", options.json, "Also write the figures to this file");
  app.footer("Example:\n  bench_unit --ranks 2,4 --megabytes 25");
  CLI11_PARSE(app, argc, argv);
  try {
    if (const auto result_file = weft::bench::result_file()) {
      run_rank(options, *result_file);
    } else {
      run_all(options, {argv + 1, argv + argc});
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
