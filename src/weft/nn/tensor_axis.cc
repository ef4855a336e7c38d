#include "weft/nn/tensor_axis.h"

#include <fmt/format.h>

#include <map>
#include <utility>

#include "weft/autograd/collectives.h"
#include "weft/core/error.h"

namespace weft::nn {
namespace {

constexpr int64_t kSequenceDim = 1;

}  // namespace

struct TensorAxis::Groups {
  std::map<int64_t, Comm> copies;  // by number of ranks
};

TensorAxis::TensorAxis(Comm comm, bool sequence_parallel)
    : comm_(std::move(comm)), sequence_parallel_(sequence_parallel && comm_.size() > 1), groups_(std::make_shared<Groups>()) {}

at::Tensor TensorAxis::enter(const at::Tensor& x) const {
  return sequence_parallel_ ? autograd::all_gather(x, kSequenceDim, comm_) : autograd::copy_to(x, comm_);
}

at::Tensor TensorAxis::leave(const at::Tensor& partial) const {
  return sequence_parallel_ ? autograd::reduce_scatter(partial, kSequenceDim, comm_) : autograd::reduce_from(partial, comm_);
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
