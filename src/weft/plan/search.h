// Search over all legal layouts of a job: memory first, time in closed form, reasons for what was rejected.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "weft/plan/estimate.h"

namespace weft::plan {

enum class Objective { speed, memory, balanced };  ///< tokens/s; least memory; tokens/s among those with a fit probability >= 99%

/// What is fixed and what may vary. Lists that are empty are filled with every legal value.
struct SearchRequest {
  model::ModelSpec spec;
  machine::Machine machine;
  machine::Software software;
  machine::Precision precision = machine::Precision::bf16;
  int64_t sequence = 4096;
  int64_t devices = 8;
  int64_t global_batch = 256;
  Objective objective = Objective::speed;
  double fit_probability = 0.9;  ///< least probability of fitting
  std::vector<int64_t> tp, pp, cp, ep, micro_batch;
  std::vector<int> zero;
  std::vector<std::string> schedules{"1f1b", "zb-h1", "zb-v"};  ///< of pipelines; 1f1b is interleaved over several chunks
  double simulate_actions = 2e6;  ///< budget: the fastest pipelines are simulated action by action; 0: closed form only
  bool offload = true;  ///< what does not fit is tried with the optimizer in host memory
};

struct Candidate {
  layout::Layout layout;
  Memory memory;
  Time time;
  double tokens_per_second = 0;
  bool simulated = false;  ///< time is the simulation's, not the closed form's
};

/// Why a group of layouts lost: the fastest of them, what stops it, and the smallest change that makes it legal.
struct Rejection {
  layout::Layout layout;
  Memory memory;
  double over_gib = 0;   ///< beyond the device, at the asked probability
  std::string reason;    ///< "stage 0 over by 3.1 GiB: activations 31.0 of 82.7 GiB"
  std::string change;    ///< "recompute full: 61.2 GiB, 23% slower than the best"; empty when no single change helps
};

struct SearchResult {
  std::vector<Candidate> ranked;      ///< best first
  std::vector<Candidate> pareto;      ///< no other is faster with less memory
  std::vector<Rejection> rejected;    ///< one per strategy (tp, pp, cp, zero) that never fits, offloaded or not
  int64_t considered = 0;             ///< legal layouts
  int64_t fitting = 0;
  bool host_short = false;            ///< layouts would fit the device with the optimizer offloaded, but not the host
  int64_t simulated = 0;              ///< layouts whose pipeline was simulated
  double seconds = 0;                 ///< wall time of the search
};

/// Findings of a request that no layout can satisfy (zero devices, batch smaller than ...). Empty when there is a space.
Findings check(const SearchRequest& request);

/// Throws ConfigError with all findings when the request is impossible.
SearchResult search(const SearchRequest& request, const cost::Tuning& tuning);

/// The decision in words, step by step: what fits on one device, what had to be divided, and why these degrees.
std::vector<std::string> explain(const SearchRequest& request, const SearchResult& result, const cost::Tuning& tuning);

/// What one more of something would bring: (change, relative gain in tokens/s of the best layout).
struct Sensitivity {
  std::string change;
  double gain = 0;
  std::string layout;
};
std::vector<Sensitivity> sensitivity(const SearchRequest& request, const SearchResult& result, const cost::Tuning& tuning);

}  // namespace weft::plan
