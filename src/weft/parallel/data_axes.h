// The ranks of a sharded DataParallel as a grid: replicas x shards (HSDP; PyTorch's HYBRID_SHARD).
#pragma once

#include <map>
#include <set>
#include <string>

#include "weft/comm/comm.h"

namespace weft::parallel {

/// Rank r of `all` holds shard r % dp_shard of replica r / dp_shard: neighbouring ranks share one copy of the model's states, and
/// ranks with the same shard hold the same numbers. With dp_shard = size there is one replica. Calls of different Comms are not
/// ordered between them; within each the order is fixed.
struct DataAxes {
  Comm all;       ///< every rank: what is agreed, and start values
  Comm shard;     ///< one replica: gradients are reduce-scattered here
  Comm gathers;   ///< the same ranks, for gathers of parameters
  Comm replicas;  ///< the ranks with the same shard: reduced shards are all-reduced here; size 1 with one replica
  std::map<int64_t, Comm> near;  ///< by size: parts of a replica that hold a copy of a Unit between forward and backward (Reshard)
};

/// dp_shard: ranks of a replica; 0 = all. near: sizes of DataAxes::near. Collective; check_same_model has seen to it that ranks
/// agree on them and that they divide what they cut.
DataAxes make_data_axes(const Comm& all, int64_t dp_shard, const std::set<int64_t>& near);

/// Replicas hold the same gradients, so they must have found the same norm. CommError with the norms and ranks if they have not:
/// something changed gradients on some ranks only, and the copies of the model would drift apart. Collective; on each replica the
/// ranks pass the same norm.
void check_replicas_agree(const DataAxes& axes, double norm);

/// Sums over the groups.
std::map<std::string, TrafficCount> traffic_of(const DataAxes& axes);

}  // namespace weft::parallel
