// How long it takes until an exception on one rank, inside weft::guard, is a CommError with its text on the others: for each back
// end, while they wait in an all-reduce or for a message, or are between calls. Ranks are processes of this machine, which share
// one clock. The deadline is ten minutes: nothing but the abort can end the waits.
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <thread>

#include "bench/support/own_ranks.h"
#include "weft/comm/world.h"
#include "weft/core/error.h"

namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

constexpr const char* kText = "the disk is full";
constexpr auto kBetweenCalls = std::chrono::milliseconds(5);  // the others call so often when they are between calls

const std::vector<std::string> kStates{"all_reduce", "message", "between calls"};

double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

/// One abort in a world of its own. Rank 1 throws after a moment, so that the others have settled in their waits. Returns when
/// it threw, or when this rank was told.
double one_abort(weft::BackendKind backend, const std::string& state, std::chrono::milliseconds settle) {
  const auto world = weft::World::init({.backend = backend, .timeout = std::chrono::minutes(10)});
  const weft::Comm& comm = world.comm();
  comm.barrier();
  double thrown = 0;
  try {
    if (comm.rank() == 1) {
      weft::guard(world, [&] {
        std::this_thread::sleep_for(settle);
        thrown = now();
        throw std::runtime_error(kText);
      });
    }
    at::Tensor t = at::ones({4});
    if (state == "all_reduce") comm.all_reduce(t).wait();
    if (state == "message") comm.recv(t, 1).wait();
    for (;;) {
      comm.progress();
      std::this_thread::sleep_for(kBetweenCalls);
    }
  } catch (const weft::CommError& e) {
    if (e.failure().cause.find(kText) == std::string::npos) throw;
    return now();
  } catch (const std::runtime_error&) {
    return thrown;
  }
}

void run_rank(int rounds, const std::string& result_file) {
  // The times travel over a world that nobody aborts.
  const auto reports = weft::World::init({.timeout = std::chrono::minutes(10)});
  std::ofstream result;
  if (reports.rank() == 0) result.open(result_file);
  for (const auto& [name, backend] : {std::pair("local", weft::BackendKind::local), std::pair("gloo", weft::BackendKind::gloo)}) {
    for (const std::string& state : kStates) {
      for (int round = 0; round < rounds; ++round) {
        // Beats of 200 ms: the moments spread over one.
        const double at = one_abort(backend, state, std::chrono::milliseconds(100 + 37 * round % 200));
        at::Tensor all = at::zeros({reports.size()}, at::kDouble), mine = at::zeros({1}, at::kDouble);
        *mine.mutable_data_ptr<double>() = at;
        reports.comm().all_gather(all, mine).wait();
        if (!result.is_open()) continue;
        const auto* times = all.const_data_ptr<double>();
        double last = 0;
        for (int r = 0; r < reports.size(); ++r) last = std::max(last, times[r] - times[1]);
        result << Json{{"backend", name}, {"state", state}, {"ms", last * 1e3}} << std::endl;
      }
    }
  }
}

void run_all(int ranks, const std::string& json, const std::vector<std::string>& arguments) {
  const auto lines = weft::bench::run_own_ranks(ranks, arguments);
  fmt::print("from the throw on rank 1 to the CommError on the last of {} ranks, ms\n\n", ranks);
  fmt::print("{:<8} {:<14} {:>7} {:>9} {:>9} {:>9}\n", "backend", "others are in", "rounds", "least", "median", "most");
  Json report = Json::array();
  for (size_t begin = 0, end; begin < lines.size(); begin = end) {
    std::vector<double> times;
    for (end = begin; end < lines.size() && lines[end]["backend"] == lines[begin]["backend"] &&
                      lines[end]["state"] == lines[begin]["state"];
         ++end) {
      times.push_back(lines[end]["ms"].get<double>());
    }
    std::sort(times.begin(), times.end());
    const double median = times[times.size() / 2];
    report.push_back({{"backend", lines[begin]["backend"]}, {"state", lines[begin]["state"]}, {"rounds", times.size()},
                      {"least_ms", times.front()}, {"median_ms", median}, {"most_ms", times.back()}});
    fmt::print("{:<8} {:<14} {:>7} {:>9.2f} {:>9.2f} {:>9.2f}\n", lines[begin]["backend"].get<std::string>(),
               lines[begin]["state"].get<std::string>(), times.size(), times.front(), median, times.back());
  }
  if (!json.empty()) std::ofstream(json) << report.dump(1) << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  int ranks = 3, rounds = 20;
  std::string json;
  CLI::App app("How soon an exception on one rank is known on the others");
  app.add_option("--ranks", ranks, "Number of ranks")->check(CLI::Range(2, 64))->capture_default_str();
  app.add_option("--rounds", rounds, "Aborts per back end and state")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--json", json, "Also write the figures to this file");
  app.footer("Example:\n  bench_abort --ranks 3 --rounds 20");
  CLI11_PARSE(app, argc, argv);
  try {
    if (const auto result_file = weft::bench::result_file()) {
      run_rank(rounds, *result_file);
    } else {
      run_all(ranks, json, {argv + 1, argv + argc});
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
