// Machine: a device with its node, links and network; the software that runs on it.
#pragma once

#include <cstdint>
#include <string>

#include "weft/machine/device.h"

namespace weft::machine {

/// A cluster of equal nodes.
struct Machine {
  Device device;
  int64_t node_devices = 8;      ///< devices that share one host
  int64_t link_domain = 8;       ///< devices that reach each other over NVLink or the like
  double nic_gbits = 400;        ///< per device
  bool host_network = false;     ///< host cores run the network's protocol (Omni-Path)
  double oversubscription = 1.0; ///< bandwidth is divided by this for traffic that leaves a pod of `pod_devices`
  double host_memory_gib = 0;    ///< of one node's host, which its devices share; 0: none beside the devices'
  int64_t pod_devices = 0;       ///< 0: no oversubscribed tier

  static Machine of(const std::string& device_name);
};

/// What the training software does; it decides launch cost, fusion and overlap, so it is an input like the hardware.
struct Software {
  enum class Kernels { eager, fused };          ///< eager: one kernel per tensor operation; fused: compiler or hand-written
  enum class Attention { unfused, flash };      ///< unfused: scores in memory
  /// Bytes per logit at the peak. separate: fp32 copy, log-softmax, gradient (12); split: torch's vocabulary-parallel form of
  /// the same, one temporary more (16); in_place: 16-bit logits and the fp32 softmax that becomes the gradient (6);
  /// compiled: 16-bit logits and gradient (4).
  enum class Loss { separate, split, in_place, compiled };
  /// fp32: accumulated and reduced in fp32; mixed: 16 bit on the wire beside an fp32 accumulator; half: 16 bit throughout.
  enum class Gradients { fp32, mixed, half };
  Kernels kernels = Kernels::fused;
  Attention attention = Attention::flash;
  bool matched_attention = true;  ///< the attention kernel is written for this generation (FlashAttention-3, cuDNN) or an older one
  bool overlap_tp = false;        ///< tensor-parallel communication is split and overlapped with the products
  bool overlap_tp_backward = true; ///< the input gradient's reduction over tensor-parallel ranks runs beside the weight gradient's product
  bool overlap_pp = true;         ///< sends and receives do not block
  bool whole_sends = false;       ///< every tensor-parallel rank sends the whole activation (DeepSpeed's pipeline)
  bool overlap_dp = true;         ///< gradient reduction under the backward, parameter gather under the forward
  bool overlap_gather = true;     ///< the parameter gather of ZeRO-1 hides under the next forward (Megatron); DeepSpeed's follows the step
  bool sharded_copies = true;     ///< FSDP copies between the buffers that it communicates and the parameters (PyTorch), or computes with views of them
  Loss loss = Loss::separate;
  bool low_precision_saved = true; ///< fp8 products keep their fp8 inputs for the backward instead of 16-bit ones
  Gradients gradients = Gradients::fp32;
  bool static_allocation = true;  ///< few, equal tensor sizes (fused kernels, expandable segments): the allocator fragments little
  bool frozen_base = false;       ///< adapters only: no weight gradients, no optimizer for the base model
  bool dropout = false;
  bool python_checkpoint = false; ///< recompute through a Python autograd function that saves and restores random state
  bool graphs = false;            ///< captured launches: the host is never the limit, and kernels follow each other closely
  bool blocking_launches = false; ///< every launch waits for its kernel (CUDA_LAUNCH_BLOCKING): host and device take turns
  bool captured_blocks = false;   ///< launches of whole parts of a block are captured: the host is not the limit, gaps between kernels stay
  bool overlap_ep = false;        ///< the exchange of one micro-batch's tokens runs under another's products
  /// Parts of a block that are computed again one by one (Megatron's recompute modules), beside the layout's recompute.
  bool recompute_norms = false, recompute_activation = false, recompute_mlp = false;
  /// How fp8 finds its scales. delayed: from earlier steps; current: a pass over the tensor before the cast; block: per 32
  /// values inside the cast, which then writes rows and columns; rows: one scale per row and column (torchao).
  enum class Scaling { delayed, current, block, rows };
  Scaling scaling = Scaling::delayed;
};

}  // namespace weft::machine
