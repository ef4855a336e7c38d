#include "weft/comm/wire.h"

#include <ATen/ops/from_blob.h>

namespace weft::detail {

c10d::ReduceOp to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum: return c10d::ReduceOp::SUM;
    case ReduceOp::avg: return c10d::ReduceOp::AVG;
    case ReduceOp::min: return c10d::ReduceOp::MIN;
    case ReduceOp::max: return c10d::ReduceOp::MAX;
    case ReduceOp::product: return c10d::ReduceOp::PRODUCT;
  }
  return c10d::ReduceOp::SUM;
}

WireReduction gloo_reduction(const at::Tensor& tensor, ReduceOp op) {
  const at::NoGradGuard no_grad;
  const auto type = tensor.scalar_type();
  const auto c10d_op = to_c10d(op == ReduceOp::avg ? ReduceOp::sum : op);
  switch (type) {
    case at::kBFloat16:
    case at::kHalf: return {tensor.variable_data().to(at::kFloat), c10d_op};
    case at::kShort: return {tensor.variable_data().to(at::kInt), c10d_op};
    // Truth values: sum and max are "or", product and min are "and".
    case at::kBool:
      return {tensor.variable_data().to(at::kByte),
              op == ReduceOp::sum || op == ReduceOp::max ? c10d::ReduceOp::MAX : c10d::ReduceOp::MIN};
    default: return {tensor.variable_data(), c10d_op};
  }
}

void finish_gloo_reduction(at::Tensor out, at::Tensor wire, ReduceOp op, int ranks) {
  const at::NoGradGuard no_grad;
  if (op == ReduceOp::avg) {
    c10::isIntegralType(wire.scalar_type(), true) ? wire.div_(ranks, "trunc") : wire.div_(ranks);
  }
  if (wire.data_ptr() != out.data_ptr()) copy_quietly(out, wire);
}

void reduce_parts(const at::Tensor& out, const at::Tensor& parts, ReduceOp op) {
  const at::NoGradGuard no_grad;
  const auto type = parts.scalar_type();
  const bool half = type == at::kBFloat16 || type == at::kHalf;
  at::Tensor total = parts[0].to(half ? at::kFloat : type, /*non_blocking=*/false, /*copy=*/true);
  for (int64_t r = 1; r < parts.size(0); ++r) {
    const at::Tensor part = half ? parts[r].to(at::kFloat) : parts[r];
    switch (op) {
      case ReduceOp::sum:
      case ReduceOp::avg: type == at::kBool ? total.logical_or_(part) : total.add_(part); break;
      case ReduceOp::min: total = at::minimum(total, part); break;
      case ReduceOp::max: total = at::maximum(total, part); break;
      case ReduceOp::product: total.mul_(part); break;
    }
  }
  finish_gloo_reduction(out, total, op, static_cast<int>(parts.size(0)));
}

at::Tensor as_bytes(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::kByte) return tensor.variable_data().view({-1});
  // Not view(kByte): that refuses conjugate and zero-dimensional tensors. `tensor` outlives the call (Flight::tensors).
  return at::from_blob(tensor.data_ptr(), {static_cast<int64_t>(tensor.nbytes())}, at::TensorOptions().dtype(at::kByte));
}

void copy_quietly(const at::Tensor& to, const at::Tensor& from) {
  const at::NoGradGuard no_grad;
  to.variable_data().copy_(from.variable_data().view(to.sizes()));
}

}  // namespace weft::detail
