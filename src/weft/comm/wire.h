// Closes the gaps of gloo: what it reduces is a tensor of a type that it handles, with an operation that it handles, and
// the result is brought into the caller's tensor afterwards. bf16 and fp16 sums are formed in fp32 and rounded once.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "weft/comm/comm.h"

namespace weft::detail {

c10d::ReduceOp to_c10d(ReduceOp op);

struct WireReduction {
  at::Tensor tensor;  ///< what the back end reduces: the caller's own tensor where possible
  c10d::ReduceOp op;
};

/// How gloo forms `op` over tensors like `tensor`.
WireReduction gloo_reduction(const at::Tensor& tensor, ReduceOp op);
/// Brings the reduced wire tensor of `ranks` ranks into `out` (divides for avg; integers truncate towards zero).
void finish_gloo_reduction(at::Tensor out, at::Tensor wire, ReduceOp op, int ranks);

/// Reduces parts [ranks, n] over their first dim, in rank order, into out (n elements in any shape).
void reduce_parts(const at::Tensor& out, const at::Tensor& parts, ReduceOp op);

/// The same memory as bytes, for calls that only move data: every dtype can be moved.
at::Tensor as_bytes(const at::Tensor& tensor);

/// Copies without bumping the version counter that autograd checks: the caller's saved tensors stay valid.
void copy_quietly(const at::Tensor& to, const at::Tensor& from);

}  // namespace weft::detail
