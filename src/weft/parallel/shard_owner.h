// What an optimizer, which sees nothing but a shard, can know of it; and its way to the engine that has to gather what it writes.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "weft/comm/comm.h"

namespace weft {

/// Of one of DataParallel::shards(): the ranks' shards, one after the other, are the parameter in row-major order.
struct ShardInfo {
  std::string name;
  std::vector<int64_t> shape;  ///< of the whole parameter
  std::vector<int64_t> cuts;   ///< rank r of `ranks` holds the elements cuts[r] .. cuts[r + 1] - 1; the last cut is numel()
  Comm ranks;                  ///< whose shards these are; for collectives of an optimizer, in the same order on all of them

  int64_t numel() const { return cuts.back(); }
  int64_t begin() const { return cuts[static_cast<size_t>(ranks.rank())]; }
  int64_t end() const { return cuts[static_cast<size_t>(ranks.rank()) + 1]; }
};

/// Null for a tensor that is no shard: whoever has it has all of it. Valid as long as `tensor` and its DataParallel.
const ShardInfo* shard_info(const at::Tensor& tensor);

namespace parallel {

/// `updated` is called when an optimizer has written `shard`.
void set_owner(const at::Tensor& shard, ShardInfo info, std::function<void()> updated);

/// Weft's optimizers call it for each of their parameters at the end of a step. No-op for tensors without owner.
void notify_updated(const at::Tensor& parameter);

}  // namespace parallel
}  // namespace weft
