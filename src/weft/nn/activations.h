// What Units keep between forward and backward: everything, less with more computing, or in host memory.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <string>

#include "weft/autograd/recompute.h"

namespace weft {

struct RecomputeOptions {
  Recompute mode = Recompute::full;
  int64_t every = 1;        ///< of the Units named, the first and every `every`-th after it
  std::string units = "*";  ///< names of Units, as named_modules() has them: "layers.*|head" (core/pattern.h)
};

/// From the next forward on, Units of `module` give up what `mode` names and compute it again in backward: activations of one
/// Unit at a time, for at most one more forward. Losses and gradients keep their bits. Works with and without DataParallel, at
/// every position of its dial; the second forward needs no gather of its own. A Unit inside another that is recomputed goes
/// with that one. May be called again: of two calls that name a Unit the later counts.
///
/// Kept for the second forward are the forward's arguments: copies, which share the elements of tensors; what arguments point
/// to must live until backward. Buffers (BatchNorm statistics) are changed once, random numbers of libtorch's default CPU
/// generator are drawn again as they were (ranks as threads share that generator: use processes, or Weft's dropout). Other
/// effects of a forward happen twice unless it asks is_recomputing().
///
/// Returns the number of Units named by `units` and `every`. ConfigError if there is none, if `every` < 1, or if their
/// activations are kept on the host.
int64_t set_recompute(torch::nn::Module& module, const RecomputeOptions& options = {});
template <class Contained>
int64_t set_recompute(const torch::nn::ModuleHolder<Contained>& holder, const RecomputeOptions& options = {}) {
  return set_recompute(*holder.ptr(), options);
}

/// From the next forward on, what autograd saves in the named Units lies in host memory until their backward. For modules on
/// the CPU nothing moves. `on` = false ends it. Returns the number of Units. ConfigError if there is none, or if one is
/// recomputed.
int64_t offload_activations(torch::nn::Module& module, const std::string& units = "*", bool on = true);
template <class Contained>
int64_t offload_activations(const torch::nn::ModuleHolder<Contained>& holder, const std::string& units = "*", bool on = true) {
  return offload_activations(*holder.ptr(), units, on);
}

}  // namespace weft
