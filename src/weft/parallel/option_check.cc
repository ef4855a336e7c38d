#include "weft/parallel/option_check.h"

#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "weft/core/units.h"

namespace weft::parallel {
namespace {

std::string text_of(std::optional<at::ScalarType> dtype) { return dtype ? c10::toString(*dtype) : "as it is"; }

std::string text_of(const Reshard& reshard) {
  return reshard.group() ? std::to_string(*reshard.group()) : reshard.after_forward() ? "true" : "false";
}

void check_reshard(const Reshard& reshard, int64_t shards, Findings& findings) {
  if (!reshard.group()) return;
  std::vector<int64_t> legal = divisors(shards);
  std::erase_if(legal, [shards](int64_t size) { return size == 1 || size == shards; });
  if (std::ranges::find(legal, *reshard.group()) != legal.end()) return;
  findings.add("reshard_after_forward",
               fmt::format("{} ranks cannot hold one copy between them where {} share the parameters out", *reshard.group(), shards),
               legal.empty() ? "use true or false" : fmt::format("legal values: {}, or true or false", fmt::join(legal, ", ")));
}

}  // namespace

void check_options(const DataParallelOptions& o, int64_t ranks, Findings& findings) {
  if (o.dp_shard != 0 && o.sharding == Sharding::none) {
    return findings.add("dp_shard", fmt::format("{} with Sharding::none, under which nothing is sharded", o.dp_shard),
                        "leave it out, or choose what to shard");
  }
  if (o.dp_shard < 0 || (o.dp_shard > 0 && ranks % o.dp_shard != 0)) {
    return findings.add("dp_shard", fmt::format("{} ranks do not divide into replicas of {}", ranks, o.dp_shard),
                        fmt::format("legal values: {}, or 0 for all", fmt::join(divisors(ranks), ", ")));
  }
  if (o.sharding == Sharding::parameters) check_reshard(o.reshard_after_forward, o.dp_shard > 0 ? o.dp_shard : ranks, findings);
}

std::string describe(const DataParallelOptions& o) {
  const char* buffers[] = {"broadcast", "average", "local"};
  return fmt::format("options sharding {}, dp_shard {}, reshard_after_forward {}, prefetch {}, grad_scale {}, buffers {}, gradient_dtype {}, "
                     "reduce_dtype {}, reduce_hook {}, bucket {} and {} bytes",
                     static_cast<int>(o.sharding), o.dp_shard, text_of(o.reshard_after_forward), o.prefetch,
                     o.grad_scale == GradScale::sum ? "sum" : "mean_over_ranks", buffers[static_cast<int>(o.buffers)],
                     text_of(o.gradient_dtype), text_of(o.reduce_dtype), o.reduce_hook ? "yes" : "no", o.bucket.bytes, o.bucket.last_bytes);
}

}  // namespace weft::parallel
