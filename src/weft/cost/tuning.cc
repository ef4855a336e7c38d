#include "weft/cost/tuning.h"

#include "weft/core/error.h"

namespace weft::cost {

const std::vector<TunedConstant>& tuned_constants() {
  // name, member, start, spread, low, high, unit, meaning, origin
  static const std::vector<TunedConstant> kTable = {
      {"gemm_share", &Tuning::gemm_share, 0.95, 0.05, 0.8, 1.0, "", "large products in training over the benchmark's best", "the benchmark takes the best of thousands of shapes on an idle device"},
      {"gemm_fill_us", &Tuning::gemm_fill_us, 2, 0.5, 0.3, 8, "us", "time that each wave of tiles loses to fill and drain", "memory latency of 0.6-0.9 us twice, barriers, the tile scheduler: 1-4 us"},
      {"sustained_share", &Tuning::sustained_share, 0.95, 0.05, 0.85, 1.0, "", "Hopper and Blackwell: products while all devices of a node work over a benchmark of one", "their dense peak exceeds what the power limit sustains; a benchmark lasts milliseconds on one device"},
      {"block_scaled_share", &Tuning::block_scaled_share, 0.95, 0.05, 0.85, 1.0, "", "products with a scale per 32 values over those with one per tensor", "Megatron-Bridge publishes both recipes on equal machines: 4-7% apart"},
      {"blackwell_share", &Tuning::blackwell_share, 0.9, 0.15, 0.6, 1.0, "", "Blackwell, 16 bit: sustained over benchmarked product rate", "sustained power; fitted: SimuMax (B200) and Megatron-Bridge BF16 rows (GB200), which agree"},
      {"attention_forward", &Tuning::attention_forward, 0.55, 0.25, 0.4, 0.85, "", "flash attention forward over the best product rate", "FlashAttention-2/3 and cuDNN reports give 0.5-0.7 for whole causal kernels"},
      {"attention_backward", &Tuning::attention_backward, 0.45, 0.25, 0.35, 0.8, "", "flash attention backward over the best product rate", "FlashAttention-2/3 reports give 0.4-0.6"},
      {"older_attention", &Tuning::older_attention, 0.55, 0.25, 0.4, 1.0, "", "attention kernels of the previous generation", "FlashAttention-3 paper: FlashAttention-2 reaches about half on Hopper"},
      {"memory_share", &Tuning::memory_share, 0.85, 0.05, 0.8, 0.92, "", "streaming kernels over memory bandwidth", "stream benchmarks reach 0.80-0.92 of the data sheet"},
      {"kernel_gap_us", &Tuning::kernel_gap_us, 3, 0.5, 1, 6, "us", "idle device between two kernels", "back-to-back launches leave 1-6 us"},
      {"host_kernel_us", &Tuning::host_kernel_us, 22, 0.3, 10, 50, "us", "host time for one kernel from Python", "5-10 us per operation of eager PyTorch (public profiles), 2.5 operations per kernel: 50-70 for the 21 kernels of a Megatron layer"},
      {"host_recompute_us", &Tuning::host_recompute_us, 780, 0, 0, 2000, "us", "host time that a Python recompute block adds", "60 operations, counted: saving, forking and restoring random state, detaching, entering the modules again"},
      {"nic_share", &Tuning::nic_share, 0.85, 0.15, 0.6, 0.95, "", "collectives over the NIC rate", "NCCL over InfiniBand and RoCE reaches 0.8-0.95"},
      {"omni_path_share", &Tuning::omni_path_share, 0.5, 0, 0.2, 1, "", "Omni-Path over networks that offload", "its protocol runs on host cores, device memory is staged; set by BLOOM's layouts with 2 to 12 stages"},
      {"tp_overlap_hidden", &Tuning::tp_overlap_hidden, 0.6, 0.3, 0.2, 0.9, "", "share of split tensor-parallel communication that hides", "four pieces hide at most three quarters"},
      {"step_fixed_ms", &Tuning::step_fixed_ms, 5, 0.7, 1, 50, "ms", "host work per step", "loss read-back, logging, learning rate: a few ms"},
      {"overlap_slowdown", &Tuning::overlap_slowdown, 0.4, 0.5, 0.15, 1.0, "", "compute lost per second of network communication that overlaps it", "NCCL's 24 channels take 18% of the multiprocessors; kernels that fill a device in whole waves then need one wave more: 19% mean, 40% worst reported"},
      {"straggler", &Tuning::straggler, 0.002, 1.0, 0.0002, 0.01, "", "wait for the slowest device per doubling of devices", "runs on 64 to 2,048 devices slow down by 1-2%; fitted: dgxc, mlperf"},
      {"expert_imbalance", &Tuning::expert_imbalance, 1.1, 0.1, 1.0, 1.3, "", "rows of the fullest expert rank over the mean", "forced-balance runs leave rounding and the draw of random routing: 1.05-1.2"},
      {"dispatch_share", &Tuning::dispatch_share, 0.9, 0.5, 0.3, 1.6, "", "expert exchange over the plain all-to-all", "1: a plain all-to-all; fused dispatchers are above, unfused ones below"},
      {"expert_launches", &Tuning::expert_launches, 130, 0, 0, 500, "", "kernels around the expert products of one layer's forward", "small micro-batches of Qwen3 30B take 9 ms a layer on H100 and B200 alike: the host's time for so many"},
      {"context_gib", &Tuning::context_gib, 0.6, 0, 0.2, 1.5, "GiB", "device context and workspaces", "device context with lazy loading 0.25-0.5 GB plus workspaces (public reports)"},
      {"reserve_share", &Tuning::reserve_share, 0.06, 0, 0.02, 0.1, "", "allocator cache over live tensors", "allocator fragmentation 5-10% usual; simumax reserved over allocated 1.04-1.08, titan compiled runs"},
      {"dynamic_reserve_share", &Tuning::dynamic_reserve_share, 0.15, 0, 0.05, 0.4, "", "the same for eager kernels and older allocators", "titan eager over compiled runs 1.07; bloom device totals"},
      {"fit_sigma", &Tuning::fit_sigma, 0.05, 0, 0.01, 0.2, "", "relative deviation of the memory estimate", "residuals of simumax and titan memory rows"},
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
