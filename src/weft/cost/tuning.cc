#include "weft/cost/tuning.h"

#include "weft/core/error.h"

namespace weft::cost {

const std::vector<TunedConstant>& tuned_constants() {
  static const std::vector<TunedConstant> kTable = {
      {"gemm_share", &Tuning::gemm_share, "", "large products in training over the benchmark's best", "fitted: korth22, vtrain-multi, dgxc, mlperf step times (A100, H100)"},
      {"gemm_k_half", &Tuning::gemm_k_half, "", "inner size at which a product reaches half its rate (A100)", "start 256-512 from pipeline depth of library kernels; fitted: korth22, dgxc"},
      {"fp8_share", &Tuning::fp8_share, "", "fp8 products in training over the fp8 benchmark's best", "fitted: dgxc and mlperf fp8 step times"},
      {"low_k_growth", &Tuning::low_k_growth, "", "fp8: k_half grows with this power of the rate ratio", "fitted: dgxc fp8 8B, 70B and 405B against bf16"},
      {"blackwell_share", &Tuning::blackwell_share, "", "Blackwell: sustained over benchmarked product rate", "power limit under training; fitted: bridge and simumax step times (B200, GB200)"},
      {"attention_forward", &Tuning::attention_forward, "", "flash attention forward over the best product rate", "FlashAttention-2/3 and cuDNN reports give 0.5-0.7; fitted: dgxc, bridge"},
      {"attention_backward", &Tuning::attention_backward, "", "flash attention backward over the best product rate", "FlashAttention-2/3 reports give 0.4-0.6; fitted: dgxc, bridge"},
      {"older_attention", &Tuning::older_attention, "", "attention kernels of the previous generation", "FlashAttention-3 paper: FA2 reaches about half on Hopper; fitted: mpt, titan"},
      {"memory_share", &Tuning::memory_share, "", "streaming kernels over memory bandwidth", "stream benchmarks reach 0.80-0.92 of the data sheet; upper end fitted: titan, mpt"},
      {"kernel_gap_us", &Tuning::kernel_gap_us, "us", "idle device between two kernels", "launch latency of back-to-back kernels 2-6 us; fitted: vtrain-single"},
      {"host_op_us", &Tuning::host_op_us, "us", "host time to start one kernel from Python", "eager PyTorch 5-10 us per operation (public profiles)"},
      {"checkpoint_host_us", &Tuning::checkpoint_host_us, "us", "host time of one Python recompute block", "saving and restoring generator state around every block; fitted: vtrain-single"},
      {"link_share", &Tuning::link_share, "", "collectives over the link rate", "NCCL all-reduce on 8 devices: 365 of 450 GB/s (H100), 682 of 900 (B200), 240 of 300 (A100)"},
      {"nic_share", &Tuning::nic_share, "", "collectives over the NIC rate", "NCCL over InfiniBand reaches 0.8-0.95; fitted: mlperf, vtrain-multi"},
      {"overlap_slowdown", &Tuning::overlap_slowdown, "", "compute lost per overlapped communication second", "reported slow-down of overlapped compute 19% mean, 40% worst; fitted: mlperf GPT-3 from 512 to 10,752 devices"},
      {"sharded_slowdown", &Tuning::sharded_slowdown, "", "the same for FSDP's gathers and reductions", "NCCL holds 8-32 multiprocessors; fitted: mpt, titan"},
      {"tp_overlap_hidden", &Tuning::tp_overlap_hidden, "", "share of split tensor-parallel communication that hides", "four pieces hide at most three quarters; fitted: dgxc, mlperf, bridge"},
      {"step_fixed_ms", &Tuning::step_fixed_ms, "ms", "host work per step", "host work between steps: loss read-back, logging; fitted: vtrain-single"},
      {"straggler", &Tuning::straggler, "", "wait for the slowest device per doubling of devices", "fitted: dgxc 70B from 64 to 2,048 devices, mlperf 405B from 512 to 8,192"},
      {"expert_imbalance", &Tuning::expert_imbalance, "", "rows of the fullest expert rank over the mean", "forced-balance runs leave rounding; fitted: bridge expert rows"},
      {"dispatch_share", &Tuning::dispatch_share, "", "expert exchange over the plain all-to-all", "plain all-to-all assumed; reports of 61-90 GB/s of 50-450 bracket it"},
      {"context_gib", &Tuning::context_gib, "GiB", "device context and workspaces", "device context with lazy loading 0.25-0.5 GB plus workspaces (public reports)"},
      {"reserve_share", &Tuning::reserve_share, "", "allocator cache over live tensors", "allocator fragmentation 5-10% usual; simumax reserved over allocated 1.04-1.08, titan compiled runs"},
      {"dynamic_reserve_share", &Tuning::dynamic_reserve_share, "", "the same for eager kernels and older allocators", "titan eager over compiled runs 1.07; bloom device totals"},
      {"fit_sigma", &Tuning::fit_sigma, "", "relative deviation of the memory estimate", "residuals of simumax and titan memory rows"},
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
