// Every constant of the cost model that is not a data-sheet value, in one table with its origin.
#pragma once

#include <string>
#include <vector>

namespace weft::cost {

/// Values that were measured or adjusted. Everything else in cost/ follows from data sheets and arithmetic.
struct Tuning {
  double gemm_share = 0.935;
  double gemm_k_half = 345;
  double fp8_share = 0.97;
  double low_k_growth = 0.3;
  double blackwell_share = 0.8;
  double attention_forward = 0.49;
  double attention_backward = 0.4;
  double older_attention = 0.47;
  double memory_share = 0.9;
  double kernel_gap_us = 5;
  double host_op_us = 11.6;
  double checkpoint_host_us = 2230;
  double link_share = 0.85;
  double nic_share = 0.75;
  double overlap_slowdown = 0.3;
  double sharded_slowdown = 0.1;
  double tp_overlap_hidden = 0.56;
  double step_fixed_ms = 16;
  double straggler = 0.0014;
  double expert_imbalance = 1.2;
  double dispatch_share = 1.47;
  // Memory.
  double context_gib = 0.6;
  double reserve_share = 0.06;
  double dynamic_reserve_share = 0.15;
  double fit_sigma = 0.05;
};

/// Where a constant comes from.
struct TunedConstant {
  const char* name;
  double Tuning::*value;
  const char* unit;
  const char* meaning;
  const char* origin;
};

/// The table. A test holds its length at 25 or less.
const std::vector<TunedConstant>& tuned_constants();

/// Sets one constant by name; throws ConfigError with the names if there is none.
void set_constant(Tuning& tuning, const std::string& name, double value);

}  // namespace weft::cost
