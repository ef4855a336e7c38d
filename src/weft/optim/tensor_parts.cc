#include "weft/optim/tensor_parts.h"

#include <fmt/format.h>

#include "weft/core/error.h"
#include "weft/parallel/shard_owner.h"

namespace weft::optim {

int64_t TensorPart::numel() const {
  int64_t n = 1;
  for (const int64_t size : shape) n *= size;
  return n;
}

TensorPart tensor_part(const at::Tensor& parameter) {
  const ShardInfo* shard = shard_info(parameter);
  const std::vector<int64_t> local = shard != nullptr ? shard->shape : parameter.sizes().vec();
  TensorPart part{.shape = local, .placement = nn::placement_of(parameter)};
  if (shard != nullptr) part.begin = shard->begin();
  if (!local.empty()) part.columns = part.part_columns = std::max<int64_t>(local.back(), 1);
  if (!part.cut()) return part;
  const nn::TensorPlacement& placement = *part.placement;
  part.shape = placement.shape;
  part.columns = std::max<int64_t>(placement.shape.back(), 1);
  const auto last = static_cast<int>(placement.shape.size()) - 1;
  if (placement.dim == last) {
    part.column = placement.begin;
    return part;
  }
  if (placement.dim != 0) {
    throw ConfigError(fmt::format("a parameter of shape {} is cut over tensor-parallel ranks in dim {}; weft's optimizers know parts of the first and of the last dim. "
                                  "Use a torch::optim optimizer for it", c10::str(at::IntArrayRef(placement.shape)), placement.dim));
  }
  part.row = placement.begin;
  for (int d = 1; d < last; ++d) part.row *= placement.shape[static_cast<size_t>(d)];
  return part;
}

Comm tensor_ranks(const std::vector<TensorPart>& parts, const char* optimizer) {
  Comm ranks;
  for (const TensorPart& part : parts) {
    if (!part.placement || part.placement->comm.size() == 1) continue;
    if (ranks.size() > 1 && ranks.state() != part.placement->comm.state()) {
      throw ConfigError(fmt::format("{} was given parameters of two tensor-parallel groups, '{}' and '{}'. Make one optimizer for each", optimizer, ranks.name(),
                                    part.placement->comm.name()));
    }
    ranks = part.placement->comm;
  }
  return ranks;
}

}  // namespace weft::optim
