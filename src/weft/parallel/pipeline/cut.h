// Cuts a Sequential into the stages of a pipeline.
#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <vector>

#include "weft/comm/comm.h"
#include "weft/parallel/pipeline/stage.h"

namespace weft {

/// Which rank holds which stage when each has several: loop (stage s on rank s % p), or v (up and back: with two chunks rank r holds stages
/// r and 2p-1-r, as zb-v and dualpipe-v want).
enum class Placement { loop, v };

/// owner[stage] of `chunks` stages on each of `ranks` ranks. ConfigError for Placement::v with other than 1 or 2 chunks.
std::vector<int> stage_owners(int ranks, int chunks, Placement placement);

struct CutOptions {
  int chunks = 1;  ///< stages per rank
  Placement placement = Placement::loop;
  /// Modules of each stage, in order; empty: such that the largest stage has as few parameters as can be (a module without any counts little).
  std::vector<int64_t> modules;
};

/// The stages of `sequential` over the ranks of `pp`. Names of parameters stay ("3.weight"), whichever rank has them. Modules of other ranks are let
/// go; built under weft::deferred they never had memory. A parameter that modules on several stages share becomes a tied one; its values are those of the
/// first of these stages. Collective. ConfigError when the numbers of modules do not add up, or modules are fewer than stages.
Stages cut(const torch::nn::Sequential& sequential, const Comm& pp, const CutOptions& options = {});

}  // namespace weft
