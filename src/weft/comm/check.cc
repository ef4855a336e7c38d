#include "weft/comm/check.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <numeric>

#include "weft/core/error.h"

namespace weft::detail {
namespace {

template <class... Args>
[[noreturn]] void refuse(const CommState& comm, CommOp op, fmt::format_string<Args...> text, Args&&... args) {
  throw ConfigError(fmt::format("{} in group '{}': {}", name_of(op), comm.name, fmt::format(text, std::forward<Args>(args)...)));
}

std::string shape(const at::Tensor& tensor) {
  return fmt::format("{} [{}]", c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "));
}

}  // namespace

void check_tensor(const CommState& comm, CommOp op, const at::Tensor& tensor, const char* role) {
  if (!tensor.defined()) refuse(comm, op, "the {} tensor is undefined", role);
  if (tensor.layout() != at::kStrided) refuse(comm, op, "the {} tensor is sparse; convert it with to_dense()", role);
  if (!tensor.is_contiguous()) {
    refuse(comm, op, "the {} tensor {} is not contiguous (strides {}); pass tensor.contiguous() and copy the result back", role,
           shape(tensor), fmt::join(tensor.strides(), ", "));
  }
  if ((comm.local || comm.gloo) && !tensor.is_cpu()) {
    refuse(comm, op, "the {} tensor is on {}, but back end '{}' moves CPU tensors only; copy it to the CPU or choose a back end "
           "for its device", role, tensor.device().str(), comm.core->transport->name());
  }
}

void check_pair(const CommState& comm, CommOp op, const at::Tensor& out, const at::Tensor& in, int64_t out_parts,
                int64_t in_parts) {
  check_tensor(comm, op, in, "input");
  check_tensor(comm, op, out, "output");
  if (out.scalar_type() != in.scalar_type()) refuse(comm, op, "input {} and output {} differ in dtype", shape(in), shape(out));
  if (out.device() != in.device()) {
    refuse(comm, op, "input on {} and output on {}; both must be on one device", in.device().str(), out.device().str());
  }
  if (out.numel() * in_parts != in.numel() * out_parts) {
    refuse(comm, op, "input {} and output {} do not fit: the {} must have {} times the elements of the other", shape(in),
           shape(out), out_parts > in_parts ? "output" : "input", std::max(out_parts, in_parts));
  }
}

void check_rank(const CommState& comm, CommOp op, int rank, const char* role) {
  if (rank < 0 || rank >= comm.size()) {
    refuse(comm, op, "{} {} is not a rank of the group (0 .. {})", role, rank, comm.size() - 1);
  }
  if (is_message(op) && rank == comm.rank) refuse(comm, op, "{} {} is this rank itself", role, rank);
}

void check_rows(const CommState& comm, const at::Tensor& tensor, const std::vector<int64_t>& rows, const char* role) {
  if (tensor.dim() == 0) refuse(comm, CommOp::all_to_all, "the {} tensor has no dimension to split", role);
  if (static_cast<int>(rows.size()) != comm.size()) {
    refuse(comm, CommOp::all_to_all, "{} {} row counts for {} ranks", rows.size(), role, comm.size());
  }
  for (const int64_t count : rows) {
    if (count < 0) refuse(comm, CommOp::all_to_all, "{} rows [{}] hold a negative count", role, fmt::join(rows, ", "));
  }
  const int64_t sum = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  if (sum != tensor.size(0)) {
    refuse(comm, CommOp::all_to_all, "{} rows [{}] sum to {}, but the tensor has {} rows", role, fmt::join(rows, ", "), sum,
           tensor.size(0));
  }
}

void check_row_sizes(const CommState& comm, const at::Tensor& out, const at::Tensor& in) {
  const bool same_rows = out.dim() == in.dim() && out.sizes().slice(1) == in.sizes().slice(1);
  if (out.scalar_type() != in.scalar_type() || out.device() != in.device() || !same_rows) {
    refuse(comm, CommOp::all_to_all, "input {} on {} and output {} on {} must agree in dtype, device and all dims but 0",
           shape(in), in.device().str(), shape(out), out.device().str());
  }
}

void check_reducible(const CommState& comm, CommOp op, const at::Tensor& tensor, ReduceOp reduce) {
  const auto type = tensor.scalar_type();
  const bool known = type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf ||
                     type == at::kBool || c10::isIntegralType(type, false);
  if (!known) {
    refuse(comm, op, "{} has no defined sum; complex tensors: pass at::view_as_real(tensor) for sums and averages",
           shape(tensor));
  }
  if (type == at::kBool && reduce == ReduceOp::avg) {
    refuse(comm, op, "truth values have no average; convert the tensor to a floating-point type");
  }
}

}  // namespace weft::detail
