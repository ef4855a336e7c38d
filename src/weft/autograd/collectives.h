// Collectives that autograd differentiates, each with its gradient convention.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "weft/comm/comm.h"

/// Two conventions occur, and every function names its own:
///   total:       the loss of the job is the sum of the ranks' losses; the backward is the exact adjoint of the forward.
///   replicated:  what follows the call is computed equally on all ranks, loss included, and its gradient arrives equal on
///                all of them; adding these would count it size() times. (Megatron-LM's conjugate pairs.)
/// All ranks of the Comm call the same functions in the same order, forward and backward: a rank that does not need the
/// gradient still takes part. Inputs and gradients need not be contiguous. Size 1 is the identity. Double backward works.
/// Errors: ConfigError when a dim does not divide by size(); CommError as in Comm.
namespace weft::autograd {

/// Sum over the ranks. Backward (total): sum of the gradients over the ranks.
at::Tensor all_reduce(const at::Tensor& x, const Comm& comm);

/// [.., n, ..] -> [.., n * size(), ..] along `dim`, in rank order. Backward (total): sum over the ranks of the gradients of
/// this rank's part, that is reduce_scatter.
at::Tensor all_gather(const at::Tensor& x, int64_t dim, const Comm& comm);

/// [.., n * size(), ..] -> [.., n, ..]: this rank's part of the sum. Backward (total): all_gather of the gradients.
at::Tensor reduce_scatter(const at::Tensor& x, int64_t dim, const Comm& comm);

/// Rows of dim 0 to and from each rank, as Comm::all_to_all. Backward (total): the gradients of the rows go back.
at::Tensor all_to_all(const at::Tensor& x, std::vector<int64_t> out_rows, std::vector<int64_t> in_rows, const Comm& comm);

/// Sends x to rank `to` and returns what rank `from` sent, of x's shape and dtype. Backward (total): the gradient of what
/// came goes back to `from`. All ranks call it, with to and from inverse to each other (a ring, or a permutation).
at::Tensor sendrecv(const at::Tensor& x, int to, int from, const Comm& comm);

/// Identity, before a computation that the ranks share out. Backward (replicated forward, partial gradients): sum over the
/// ranks. Conjugate of reduce_from.
at::Tensor copy_to(const at::Tensor& x, const Comm& comm);

/// Sum of the ranks' partial results. Backward (replicated): identity. Conjugate of copy_to.
at::Tensor reduce_from(const at::Tensor& x, const Comm& comm);

/// This rank's part of a replicated x along `dim`. Backward (replicated): all_gather. Conjugate of gather_from.
at::Tensor scatter_to(const at::Tensor& x, int64_t dim, const Comm& comm);

/// Gathers the parts along `dim` for a replicated computation. Backward (replicated): this rank's part of the gradient,
/// nothing is added. Conjugate of scatter_to.
at::Tensor gather_from(const at::Tensor& x, int64_t dim, const Comm& comm);

}  // namespace weft::autograd
