// Causal self-attention with grouped queries.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "weft/model/spec.h"
#include "weft/nn/layers.h"
#include "weft/nn/rope.h"

namespace weft::nn {

/// Keys and values of the tokens that generation has seen: [B, tokens, Hkv, hd], undefined before the first.
struct KeyValues {
  at::Tensor keys;
  at::Tensor values;
};

/// softmax(scale q k^T + causal mask) v. q [B, T, H, hd]; k, v [B, S, Hkv, hd] with S >= T: the queries are the last T of
/// the S positions. H is a multiple of Hkv; each key head serves H / Hkv neighbouring query heads. -> [B, T, H * hd].
/// Goes through libtorch's scaled_dot_product_attention; only a soft cap on the scores needs the plain formula.
at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const model::AttentionSpec& spec,
                  Kernels kernels);

/// Projections, optional norms of queries and keys, rotation, attention, output projection.
class AttentionImpl : public torch::nn::Module {
 public:
  AttentionImpl(const model::ModelSpec& spec, const model::AttentionSpec& attention, Kernels kernels,
                const at::TensorOptions& options, const TensorAxis& tp = {});
  /// x [B, T, D] -> [B, T, D]; of this rank's part of T with sequence parallelism, which attention gathers. rope: rows of the T positions, undefined tensors for models without rotation.
  /// cache: appended to and attended to, if given.
  at::Tensor forward(const at::Tensor& x, const RopeTable& rope_rows, KeyValues* cache = nullptr);

  /// Of this rank's heads (layout/part.h).
  Linear wq{nullptr}, wk{nullptr}, wv{nullptr};
  RowLinear wo{nullptr};
  Norm q_norm{nullptr}, k_norm{nullptr};

 private:
  model::AttentionSpec spec_;
  Kernels kernels_;
  TensorAxis tp_;
};
TORCH_MODULE(Attention);

}  // namespace weft::nn
