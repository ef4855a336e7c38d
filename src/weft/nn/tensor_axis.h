// The ranks that share a model's layers out between them (tensor parallelism; Shoeybi et al. 2019, "Megatron-LM", section 3).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "weft/comm/comm.h"

namespace weft::nn {

/// Passed to the layers that are cut; a cheap value. Of one rank (the default) everything here is the identity.
///
/// A pair of layers whose first is cut by columns and whose second by rows lies between enter() and leave(). Outside of such
/// pairs activations [B, T, D] are the same on all ranks, or with sequence parallelism (Korthikanti et al. 2022, section 4.2.2) each rank
/// holds its T / size() neighbouring positions: the same bytes move, and norms, dropout and residuals are shared out too.
class TensorAxis {
 public:
  TensorAxis() = default;
  /// All ranks of `comm` use it with the same arguments. overlap: pieces in which activations travel beside the products that need or
  /// make them (autograd/overlapped_products.h); 1: the exchange comes before or after the product.
  explicit TensorAxis(Comm comm, bool sequence_parallel = false, int64_t overlap = 1);

  const Comm& comm() const { return comm_; }
  int64_t rank() const { return comm_.rank(); }
  int64_t size() const { return comm_.size(); }
  bool sequence_parallel() const { return sequence_parallel_; }

  /// Activations before layers that are cut by columns: [B, T, D] (or a part of T) -> [B, T, D], the same on all ranks.
  /// Backward: the ranks' gradients, which are partial sums, are summed (and cut along T).
  at::Tensor enter(const at::Tensor& x) const;
  /// Partial sums [B, T, D] behind layers that are cut by rows -> their sum over the ranks (or a part of T). Backward: identity (or
  /// a gather along T).
  at::Tensor leave(const at::Tensor& partial) const;

  bool overlaps() const { return overlap_ > 1 && comm_.size() > 1; }
  /// enter(x) weights[i]^T + biases[i] (undefined: none) for each i; overlaps() or not, the same numbers but for rounding.
  std::vector<at::Tensor> enter_products(const at::Tensor& x, const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& biases) const;
  /// leave(x weight^T).
  at::Tensor product_leave(const at::Tensor& x, const at::Tensor& weight) const;

  /// Over which gradients of a weight are summed that each rank uses on its part of the sequence.
  Comm sequence_comm() const { return sequence_parallel_ ? comm_ : Comm(); }
  /// `ranks` neighbours that hold the same part of a weight. Collective at the first call with a number; 1: this rank alone.
  Comm copies(int64_t ranks) const;
  /// Positions of a sequence of `tokens` that this rank holds between the layers, and the first of them. ConfigError, with the next
  /// legal lengths, when sequence parallelism cannot cut it.
  int64_t local_tokens(int64_t tokens) const;
  int64_t first_token(int64_t tokens) const { return sequence_parallel_ ? local_tokens(tokens) * rank() : 0; }

 private:
  struct Groups;

  Comm comm_;
  bool sequence_parallel_ = false;
  int64_t overlap_ = 1;
  std::shared_ptr<Groups> groups_;
};

}  // namespace weft::nn
