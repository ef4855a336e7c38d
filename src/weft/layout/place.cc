#include "weft/layout/place.h"

#include <algorithm>
#include <functional>
#include <map>
#include <cstddef>
#include <numeric>

namespace weft::layout {
namespace {

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

FlatPlan place(const std::vector<int64_t>& numels, int64_t parts, int64_t granule) {
  const int64_t alignment = std::lcm(kFlatAlignment, granule);
  FlatPlan plan;
  plan.offsets.reserve(numels.size());
  for (const int64_t numel : numels) {
    plan.offsets.push_back(plan.numel);
    plan.numel += round_up(numel, alignment);
  }
  plan.numel = round_up(plan.numel, alignment * parts);
  return plan;
}

std::vector<std::vector<int64_t>> make_buckets(const std::vector<BucketItem>& items, const BucketLimits& limits) {
  struct Open {
    std::vector<int64_t> members;
    int64_t bytes = 0;
  };
  std::map<std::string, Open> open;
  std::vector<std::vector<int64_t>> done;
  for (auto i = static_cast<int64_t>(items.size()) - 1; i >= 0; --i) {
    Open& bucket = open[items[i].key];
    if (!bucket.members.empty() && bucket.bytes + items[i].bytes > limits.bytes) {
      done.push_back(std::move(bucket.members));
      bucket = {};
    }
    bucket.members.push_back(i);
    bucket.bytes += items[i].bytes;
  }
  // What is still open holds the first parameters of each key. Its tail (ready last of all) becomes a small bucket.
  for (auto& [key, bucket] : open) {
    const auto& members = bucket.members;
    int64_t tail_bytes = 0;
    size_t cut = members.size();
    while (cut > 0 && (cut == members.size() || tail_bytes + items[members[cut - 1]].bytes <= limits.last_bytes))
      tail_bytes += items[members[--cut]].bytes;
    const auto middle = members.begin() + static_cast<std::ptrdiff_t>(cut);
    if (cut > 0) done.emplace_back(members.begin(), middle);
    done.emplace_back(middle, members.end());
  }
  // A bucket is complete when its first parameter (in table order) is.
  std::stable_sort(done.begin(), done.end(), [](const auto& a, const auto& b) { return a.back() > b.back(); });
  return done;
}

std::vector<BufferClass> gradient_buffers(const std::vector<int64_t>& ordered, const std::vector<int64_t>& others) {
  constexpr std::ptrdiff_t kInFlight = 3;
  // As many as are in flight at once, of those with more than `above` and at most `largest` bytes.
  const auto buffers_for = [&](int64_t above, int64_t largest) {
    const auto belongs = [&](int64_t bytes) { return bytes > above && bytes <= largest; };
    std::ptrdiff_t most = 0;
    for (auto first = ordered.begin(); first != ordered.end(); ++first)
      most = std::max(most, std::count_if(first, first + std::min(kInFlight, ordered.end() - first), belongs));
    most += std::count_if(others.begin(), others.end(), belongs);
    return BufferClass{.bytes = largest, .count = static_cast<int>(std::min(kInFlight, most))};
  };
  std::vector<int64_t> sizes = ordered;
  sizes.insert(sizes.end(), others.begin(), others.end());
  std::erase(sizes, 0);
  std::sort(sizes.begin(), sizes.end(), std::greater<>());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  if (sizes.empty()) return {};
  std::vector<BufferClass> best{buffers_for(0, sizes.front())};
  int64_t least = best.front().bytes * best.front().count;
  for (size_t cut = 1; cut < sizes.size(); ++cut) {
    const BufferClass large = buffers_for(sizes[cut], sizes.front()), small = buffers_for(0, sizes[cut]);
    const int64_t bytes = large.bytes * large.count + small.bytes * small.count;
    if (bytes >= least) continue;
    least = bytes;
    best = {large, small};
  }
  return best;
}

}  // namespace weft::layout
