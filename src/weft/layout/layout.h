// Layout: how one training job is spread over devices. Degrees, and what follows from them for batches and stages.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "weft/core/error.h"
#include "weft/model/spec.h"

namespace weft::layout {

/// What is computed again in the backward pass instead of being kept.
enum class Recompute {
  none,
  attention,  ///< the attention core (scores, softmax, dropout); nothing is saved with a flash kernel
  half,       ///< every second block, or the cheap half of the operations (torch "selective")
  full        ///< everything but each block's input
};

/// Degrees of every axis, outermost pp. dp counts replicas of a (pp, cp, tp) group; experts re-factor cp * dp * tp.
struct Layout {
  int64_t pp = 1;
  int64_t chunks = 1;  ///< model chunks per pipeline rank (interleaving)
  int64_t dp = 1;
  int64_t cp = 1;
  int64_t tp = 1;
  int64_t ep = 1;
  int64_t etp = 1;  ///< tensor-parallel degree inside experts
  bool sequence_parallel = false;
  int zero = 0;             ///< 0 DDP, 1 optimizer, 2 gradients, 3 parameters (FSDP)
  int64_t shard_group = 0;  ///< ranks that share one copy of the sharded state (HSDP); 0: all of dp x cp
  int64_t micro_batch = 1;  ///< sequences per replica and micro-batch
  int64_t global_batch = 1; ///< sequences per step
  Recompute recompute = Recompute::none;
  bool offload = false;  ///< optimizer state lives in host memory and the host makes the step
  std::string schedule = "1f1b";  ///< pipeline schedule by name; interleaved when chunks > 1

  int64_t devices() const { return pp * dp * cp * tp; }
  int64_t micro_batches() const { return global_batch / (dp * micro_batch); }
  /// Ranks over which optimizer state of dense parameters is divided.
  int64_t shard_ranks() const { return shard_group > 0 ? shard_group : dp * cp; }
  /// Data-parallel ranks of one expert: the ranks that hold the same experts.
  int64_t expert_dp() const { return dp * cp * tp / (ep * etp); }

  /// "tp8.sp pp4x3 dp2 zero1 mb1": the non-trivial degrees, for tables and messages.
  std::string text() const;
};

const char* recompute_name(Recompute recompute);

/// Everything that makes `layout` impossible for `spec`: value, rule, and the nearest legal values.
Findings check(const Layout& layout, const model::ModelSpec& spec);

/// Number of blocks in each of pp * chunks pipeline parts, in model order. When they do not divide, the first and the
/// last part get fewer blocks, because they also hold embedding and head. `last`: what the last part computes besides, in
/// blocks, when that is known (heads, modules that predict further tokens); uneven splits then level it out.
std::vector<int64_t> split_layers(int64_t layers, int64_t pp, int64_t chunks, double last = 0);

/// Divisors of `value`, ascending.
std::vector<int64_t> divisors(int64_t value);

/// The (up to) two divisors of `value` that enclose `wanted`, as text: "4 or 8".
std::string nearest_divisors(int64_t value, int64_t wanted);

}  // namespace weft::layout
