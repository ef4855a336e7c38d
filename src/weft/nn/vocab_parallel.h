// Embedding and loss with the rows of the vocabulary shared out over the tensor-parallel ranks.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "weft/layout/part.h"
#include "weft/nn/functional.h"
#include "weft/nn/tensor_axis.h"

namespace weft::nn {

/// Which rows a rank holds. Parts differ by at most one row, so that no row is padding.
struct VocabPart {
  TensorAxis tp;
  int64_t vocab = 0;  ///< rows of all ranks
  layout::Part rows;

  VocabPart(TensorAxis axis, int64_t vocab_size)
      : tp(std::move(axis)), vocab(vocab_size), rows(layout::part_of(vocab_size, tp.size(), tp.rank())) {}
};

/// Rows of a table of which this rank holds `part` out of `all`: tokens [B, T] int64 -> TensorAxis::leave of [B, T, hidden], zeros where
/// another rank has the row. ConfigError for a token that is no row.
at::Tensor look_up_part(const at::Tensor& weight, const at::Tensor& tokens, const layout::Part& part, int64_t all, const TensorAxis& tp);

/// Embedding whose rank looks up its own rows, zeros for others: tokens [B, T] int64 -> TensorAxis::leave of [B, T, hidden]. weight
/// [rows of this rank, hidden]. ConfigError for a token outside of the vocabulary when there are several ranks (a rank alone
/// throws libtorch's error).
class VocabEmbeddingImpl : public torch::nn::Module {
 public:
  VocabEmbeddingImpl(VocabPart part, int64_t hidden, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& tokens);

  at::Tensor weight;

 private:
  VocabPart part_;
};
TORCH_MODULE(VocabEmbedding);

/// As linear_cross_entropy, with `weight` [rows of this rank, D] and the result the same on every rank: `hidden` [N, D], `targets`
/// and the gradient that comes back are the same on all; the gradient of `hidden` is a partial sum, as TensorAxis::enter takes it
/// (loss parallel). Logits are never gathered, and with fused kernels exist for a few hundred rows at a time: per row each rank
/// sends its largest logit, its sum of exponentials and the target's logit, if it has it. Of one rank: linear_cross_entropy.
LossSum vocab_parallel_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets,
                                     int64_t ignore_index, double softcap, Kernels kernels, const VocabPart& part);

}  // namespace weft::nn
