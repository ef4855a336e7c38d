#include "weft/cost/tuning.h"

#include "weft/core/error.h"

namespace weft::cost {

const std::vector<TunedConstant>& tuned_constants() {
  static const std::vector<TunedConstant> kTable = {
      {"gemm_share", &Tuning::gemm_share, "", "large products in training over the benchmark's best", "x"},
      {"gemm_k_half", &Tuning::gemm_k_half, "", "inner size at which a product reaches half its rate (A100)", "x"},
      {"fp8_share", &Tuning::fp8_share, "", "fp8 products in training over the fp8 benchmark's best", "x"},
      {"low_k_growth", &Tuning::low_k_growth, "", "fp8: k_half grows with this power of the rate ratio", "x"},
      {"blackwell_share", &Tuning::blackwell_share, "", "Blackwell: sustained over benchmarked product rate", "x"},
      {"attention_forward", &Tuning::attention_forward, "", "flash attention forward over the best product rate", "x"},
      {"attention_backward", &Tuning::attention_backward, "", "flash attention backward over the best product rate", "x"},
      {"older_attention", &Tuning::older_attention, "", "attention kernels of the previous generation", "x"},
      {"memory_share", &Tuning::memory_share, "", "streaming kernels over memory bandwidth", "x"},
      {"kernel_gap_us", &Tuning::kernel_gap_us, "us", "idle device between two kernels", "x"},
      {"host_op_us", &Tuning::host_op_us, "us", "host time to start one kernel from Python", "x"},
      {"checkpoint_host_us", &Tuning::checkpoint_host_us, "us", "host time of one Python recompute block", "x"},
      {"link_share", &Tuning::link_share, "", "collectives over the link rate", "x"},
      {"nic_share", &Tuning::nic_share, "", "collectives over the NIC rate", "x"},
      {"overlap_slowdown", &Tuning::overlap_slowdown, "", "compute lost per overlapped communication second", "x"},
      {"sharded_slowdown", &Tuning::sharded_slowdown, "", "the same for FSDP's gathers and reductions", "x"},
      {"tp_overlap_hidden", &Tuning::tp_overlap_hidden, "", "share of split tensor-parallel communication that hides", "x"},
      {"step_fixed_ms", &Tuning::step_fixed_ms, "ms", "host work per step", "x"},
      {"straggler", &Tuning::straggler, "", "wait for the slowest device per doubling of devices", "x"},
      {"expert_imbalance", &Tuning::expert_imbalance, "", "rows of the fullest expert rank over the mean", "x"},
      {"dispatch_share", &Tuning::dispatch_share, "", "expert exchange over the plain all-to-all", "x"},
      {"context_gib", &Tuning::context_gib, "GiB", "device context and workspaces", "x"},
      {"reserve_share", &Tuning::reserve_share, "", "allocator cache over live tensors", "x"},
      {"fit_sigma", &Tuning::fit_sigma, "", "relative deviation of the memory estimate", "x"},
  };
  return kTable;
}

void set_constant(Tuning& tuning, const std::string& name, double value) {
  std::string names;
  for (const TunedConstant& constant : tuned_constants()) {
    if (name == constant.name) {
      tuning.*constant.value = value;
      return;
    }
    names += (names.empty() ? "" : ", ") + std::string(constant.name);
  }
  throw ConfigError("constant \"" + name + "\" is not in the table; known: " + names);
}

}  // namespace weft::cost
