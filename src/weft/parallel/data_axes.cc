#include "weft/parallel/data_axes.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "weft/core/error.h"

namespace weft::parallel {
DataAxes make_data_axes(const Comm& all, int64_t dp_shard, const std::set<int64_t>& near) {
  const auto ranks = static_cast<int64_t>(all.size());
  const int64_t shards = dp_shard == 0 ? ranks : dp_shard;
  const auto within = [shards](int rank) { return SplitPlace{static_cast<int>(rank / shards), rank}; };
  const auto across = [shards](int rank) { return SplitPlace{static_cast<int>(rank % shards), rank}; };
  DataAxes axes{.all = all, .shard = all, .gathers = all.split(within, all.name() + ".gather"), .replicas = Comm(), .near = {}};
  for (const int64_t size : near) {
    const auto part = [size](int rank) { return SplitPlace{static_cast<int>(rank / size), rank}; };
    axes.near.emplace(size, all.split(part, fmt::format("{}.near{}", all.name(), size)));
  }
  if (shards == ranks) return axes;
  axes.shard = all.split(within, all.name() + ".shard");
  axes.replicas = all.split(across, all.name() + ".replicate");
  return axes;
}

void check_replicas_agree(const DataAxes& axes, double norm) {
  const int replicas = axes.replicas.size();
  if (replicas == 1) return;
  const at::Tensor norms = at::empty({replicas}, at::kDouble);
  axes.replicas.all_gather(norms, at::full({1}, norm, at::kDouble)).wait();
  const auto* first = norms.const_data_ptr<double>();
  const auto differs = [&](double other) { return other != *first && !(std::isnan(other) && std::isnan(*first)); };
  const auto* found = std::find_if(first + 1, first + replicas, differs);
  if (found == first + replicas) return;
  const auto place = static_cast<int>(found - first);
  throw CommError({.rank = axes.all.world_rank(axes.all.rank()),
                   .group = axes.replicas.name(),
                   .op = "gradient norm",
                   .sequence = 0,
                   .peers = {axes.replicas.world_rank(place)},
                   .cause = fmt::format("replicas disagree on the norm of the reduced gradients: {} on rank {}, {} on rank {}. Gradients "
                                        "were changed on some ranks only after backward, and the copies of the model would drift apart",
                                        *first, axes.replicas.world_rank(0), *found, axes.replicas.world_rank(place))});
}

std::map<std::string, TrafficCount> traffic_of(const DataAxes& axes) {
  auto counts = axes.all.traffic();
  std::vector<const Comm*> others{&axes.gathers, &axes.replicas};
  for (const auto& [size, comm] : axes.near) others.push_back(&comm);
  if (axes.shard.state() != axes.all.state()) others.push_back(&axes.shard);
  for (const Comm* comm : others) {
    for (const auto& [op, count] : comm->traffic()) {
      counts[op].calls += count.calls;
      counts[op].bytes += count.bytes;
      counts[op].sent += count.sent;
    }
  }
  return counts;
}

}  // namespace weft::parallel
