// One transformer block: the stretch of the model that sharding, recompute and pipeline stages treat as a unit.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <vector>

#include "weft/model/spec.h"
#include "weft/nn/attention.h"
#include "weft/nn/dropout.h"
#include "weft/nn/layers.h"
#include "weft/nn/mlp.h"

namespace weft::models {

/// A stretch of the model: what stands before the blocks, blocks first .. end - 1, what stands behind them.
struct StagePart {
  int64_t first = 0, end = 0;
  bool embedding = false;  ///< token and position embedding
  bool head = false;       ///< final norm, head and loss

  bool operator==(const StagePart&) const = default;
};

struct TransformerOptions {
  at::ScalarType dtype = at::kFloat;  ///< of parameters and activations: fp64, fp32 or bf16
  at::Device device = at::kCPU;
  uint64_t seed = 0;                  ///< initial weights and dropout masks
  nn::Kernels kernels = nn::Kernels::fused;
  /// Parameters get no memory before DataParallel or weft::materialise makes their values, or a rank's part of them.
  bool deferred = false;
  /// The ranks that share out heads, inner MLP columns and vocabulary; every rank allocates its part alone (docs/tensor.md).
  nn::TensorAxis tp;

  /// The stretches that this rank builds, pipeline stages; empty: the whole model.
  std::vector<StagePart> parts;

  at::TensorOptions tensor() const { return at::TensorOptions(dtype).device(device); }
  at::TensorOptions parameter() const { return deferred ? tensor().device(at::kMeta) : tensor(); }
};

/// What all blocks of a forward pass share besides the hidden states. Cheap to copy; holds nothing that needs gradients.
struct BlockInputs {
  nn::RopeTable rope;                          ///< rows of these positions; undefined without rotation
  nn::TokenPlace place;                         ///< of the hidden states, which are a part of the tokens with sequence parallelism
  std::vector<nn::KeyValues>* cache = nullptr;  ///< one per layer, in generation only
};

/// Attention and MLP with their norms and residual connections. Parameters are those of layers.N in the table.
class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl(const model::ModelSpec& spec, int64_t layer, const TransformerOptions& options);
  /// x [B, T, D] -> [B, T, D].
  at::Tensor forward(const at::Tensor& x, const BlockInputs& inputs);

  nn::Norm norm1{nullptr}, norm1_after{nullptr}, norm2{nullptr}, norm2_after{nullptr};
  nn::Attention attn{nullptr};
  nn::Mlp ffn{nullptr};

 private:
  int64_t layer_;
  bool parallel_residual_;
  nn::Dropout attention_dropout_, mlp_dropout_;
};
TORCH_MODULE(Block);

}  // namespace weft::models
