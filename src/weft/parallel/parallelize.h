// Tensor parallelism for the user's own modules.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "weft/comm/comm.h"
#include "weft/nn/split.h"

namespace torch::nn {
class Module;
}

namespace weft {

/// Path patterns (core/pattern.h) of submodules, and how each is shared out.
using TensorPlan = std::vector<std::pair<std::string, TensorStyle>>;

/// Shares `module` out over the ranks of `tp`, as PyTorch's parallelize_module:
///   parallelize(*block, mesh["tp"], {{"*.wq|*.wk|*.wv|*.w1|*.w3", TensorStyle::column}, {"*.wo|*.w2", TensorStyle::row},
///                                    {"*.norm*", TensorStyle::sequence}});
/// Layers named column or row are Split<torch::nn::Linear> or Split<torch::nn::Embedding> (nn/split.h). Between a column and the
/// row that follows, activations are a rank's part, and what lies there works on parts (fewer heads). With a style `sequence` in the
/// plan, activations [B, T, ...] outside of such pairs are a rank's part of T: columns gather them, rows scatter them.
///
/// Built under weft::deferred no rank ever holds a whole weight; else values are those of rank 0. Call it before DataParallel, which
/// takes mesh["dp"] and then counts each parameter once in norms. Collective over `tp`; size 1 changes nothing.
/// Errors: ConfigError, with the path, for a pattern that names nothing, a layer that is no Split, sizes that do not divide,
/// a module named twice, or modules that differ between ranks.
///
/// overlap: pieces in which activations travel beside the products that need or make them (nn/tensor_axis.h); 1: no overlap.
void parallelize(torch::nn::Module& module, const Comm& tp, const TensorPlan& plan, int64_t overlap = 1);

}  // namespace weft
