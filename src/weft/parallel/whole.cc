#include "weft/parallel/whole.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "weft/core/error.h"
#include "weft/nn/placement.h"

namespace weft::parallel {
namespace {

/// `parameter`'s elements from the pieces [n] that the ranks hold, in rank order; with replicas the first of them has all.
at::Tensor joined(const at::Tensor& piece, const at::Tensor& parameter, const Comm& comm) {
  const at::Tensor counts = at::empty({comm.size()}, at::kLong);
  comm.all_gather(counts, at::full({1}, piece.numel(), at::kLong)).released();
  const auto* count = counts.const_data_ptr<int64_t>();
  const int64_t longest = *std::max_element(count, count + comm.size());
  const at::Tensor padded = at::zeros({longest}, piece.options()), all = at::empty({comm.size(), longest}, piece.options());
  padded.narrow(0, 0, piece.numel()).copy_(piece.flatten());
  comm.all_gather(all, padded).released();
  std::vector<at::Tensor> parts;
  int64_t total = 0;
  for (int rank = 0; rank < comm.size() && total < parameter.numel(); total += count[rank++]) parts.push_back(all[rank].narrow(0, 0, count[rank]));
  if (total != parameter.numel()) throw InternalError("the shards of a parameter do not add up to it");
  return parts.empty() ? at::empty(parameter.sizes(), piece.options()) : at::cat(parts).view(parameter.sizes());
}

}  // namespace

std::vector<NamedTensor> whole_gradients(const DataParallel& dp) {
  const at::NoGradGuard no_grad;
  const bool split = dp.options().sharding != Sharding::none && dp.comm().size() > 1;
  std::vector<NamedTensor> result;
  for (size_t i = 0; i < dp.parameters().size(); ++i) {
    const NamedTensor& parameter = dp.parameters()[i];
    const at::Tensor& grad = dp.shards()[i].tensor.grad();
    at::Tensor whole;
    if (grad.defined()) {
      whole = split ? joined(grad.detach(), parameter.tensor, dp.comm()) : grad.detach();
      whole = nn::whole_tensor(whole, nn::placement_of(parameter.tensor));
    }
    result.push_back({parameter.name, whole});
  }
  return result;
}

}  // namespace weft::parallel
