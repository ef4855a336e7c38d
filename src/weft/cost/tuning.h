// Every constant of the cost model that is not a data-sheet value, in one table with its origin.
#pragma once

#include <string>
#include <vector>

namespace weft::cost {

/// Values that were measured or adjusted. Everything else in cost/ follows from data sheets and arithmetic.
struct Tuning {
  double gemm_share = 0.918;
  double gemm_fill_us = 2.6;
  double sustained_share = 0.962;
  double block_scaled_share = 0.945;
  double blackwell_share = 0.696;
  double attention_forward = 0.568;
  double attention_backward = 0.409;
  double older_attention = 0.486;
  double memory_share = 0.832;
  double kernel_gap_us = 4.03;
  double host_kernel_us = 31.7;
  double host_recompute_us = 780;
  double nic_share = 0.805;
  double tp_overlap_hidden = 0.689;
  double step_fixed_ms = 11.1;
  double overlap_slowdown = 0.409;
  double straggler = 0.0018;
  double expert_imbalance = 1.14;
  double dispatch_share = 1.45;
  double expert_launches = 130;
  double omni_path_share = 0.5;
  // Memory.
  double context_gib = 0.6;
  double reserve_share = 0.06;
  double dynamic_reserve_share = 0.15;
  double fit_sigma = 0.05;
};

/// Where a constant comes from. Fitting (fit_constants) starts from `start`, what hardware and reports say, and pays for leaving it
/// in units of `spread`, a relative deviation; 0: it is taken as it is.
struct TunedConstant {
  const char* name;
  double Tuning::*value;
  double start, spread;
  double low, high;  ///< what physics or reports allow
  const char* unit;
  const char* meaning;
  const char* origin;
};

/// The table. A test holds its length at 25 or less.
const std::vector<TunedConstant>& tuned_constants();

/// Sets one constant by name; throws ConfigError with the names if there is none.
void set_constant(Tuning& tuning, const std::string& name, double value);

}  // namespace weft::cost
