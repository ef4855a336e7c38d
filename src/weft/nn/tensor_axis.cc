#include "weft/nn/tensor_axis.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <map>
#include <utility>

#include "weft/autograd/collectives.h"
#include "weft/autograd/overlapped_products.h"
#include "weft/core/error.h"

namespace weft::nn {
namespace {

constexpr int64_t kSequenceDim = 1;

}  // namespace

struct TensorAxis::Groups {
  std::map<int64_t, Comm> copies;  // by number of ranks
};

TensorAxis::TensorAxis(Comm comm, bool sequence_parallel, int64_t overlap)
    : comm_(std::move(comm)), sequence_parallel_(sequence_parallel && comm_.size() > 1), overlap_(overlap), groups_(std::make_shared<Groups>()) {
  if (overlap < 1) throw ConfigError(fmt::format("overlap of tensor-parallel communication in {} pieces; at least 1 (no overlap)", overlap));
}

at::Tensor TensorAxis::enter(const at::Tensor& x) const {
  return sequence_parallel_ ? autograd::all_gather(x, kSequenceDim, comm_) : autograd::copy_to(x, comm_);
}

at::Tensor TensorAxis::leave(const at::Tensor& partial) const {
  return sequence_parallel_ ? autograd::reduce_scatter(partial, kSequenceDim, comm_) : autograd::reduce_from(partial, comm_);
}

namespace {

/// [B, T, ..., D] as [B, T ..., D]; [rows, D] as one sample.
at::Tensor three_dims(const at::Tensor& x) { return x.dim() == 3 ? x : x.dim() == 2 ? x.unsqueeze(0) : x.flatten(1, -2); }

at::Tensor with_dims_of(const at::Tensor& y, const at::Tensor& x) {
  if (x.dim() == 3) return y;
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = y.size(-1);
  if (x.dim() > 3) sizes[1] = -1;  // gathered or cut
  return y.reshape(sizes);
}

}  // namespace

std::vector<at::Tensor> TensorAxis::enter_products(const at::Tensor& x, const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& biases) const {
  std::vector<at::Tensor> products;
  if (!overlaps() || x.dim() < 2) {
    const at::Tensor whole = enter(x);
    for (size_t i = 0; i < weights.size(); ++i) products.push_back(at::linear(whole, weights[i], biases[i]));
    return products;
  }
  products = autograd::products_behind_entry(three_dims(x), weights, biases, {.comm = comm_, .sequence = sequence_parallel_, .pieces = overlap_});
  for (at::Tensor& y : products) y = with_dims_of(y, x);
  return products;
}

at::Tensor TensorAxis::product_leave(const at::Tensor& x, const at::Tensor& weight) const {
  if (!overlaps() || x.dim() < 2) return leave(at::linear(x, weight));
  return with_dims_of(autograd::product_before_exit(three_dims(x), weight, {.comm = comm_, .sequence = sequence_parallel_, .pieces = overlap_}), x);
}

Comm TensorAxis::copies(int64_t ranks) const {
  if (ranks == 1) return Comm();
  if (ranks == size()) return comm_;
  const auto known = groups_->copies.find(ranks);
  if (known != groups_->copies.end()) return known->second;
  const auto place = [ranks](int rank) { return SplitPlace{static_cast<int>(rank / ranks), rank}; };
  return groups_->copies.emplace(ranks, comm_.split(place, fmt::format("{}.copies{}", comm_.name(), ranks))).first->second;
}

int64_t TensorAxis::local_tokens(int64_t tokens) const {
  if (!sequence_parallel_) return tokens;
  if (tokens % size() == 0) return tokens / size();
  const int64_t below = tokens / size() * size();
  throw ConfigError(fmt::format("sequence parallelism cuts {} tokens over {} ranks: the number must divide; nearest: {}{}", tokens, size(),
                                below > 0 ? fmt::format("{} and ", below) : "", below + size()));
}

}  // namespace weft::nn
