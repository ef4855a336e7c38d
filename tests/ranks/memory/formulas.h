// Model states of the trainer in closed form, written down apart from the code that allocates them.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "weft/config/check.h"
#include "weft/config/run_config.h"
#include "weft/model/spec.h"

namespace weft::testing {

/// Bytes per parameter of one choice of dtypes.
struct Case {
  const char* dtype;
  int64_t weight, gradient, optimizer;  ///< optimizer: masters and moments; of others than adamw the masters
};
inline constexpr Case kFp32{"fp32", 4, 4, 8}, kBf16{"bf16", 2, 4, 12}, kFp16{"fp16", 2, 4, 12}, kLow{"bf16", 2, 2, 12};

inline constexpr int64_t kAlignment = 32;
inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/// Tensors of one flat buffer: each starts at a multiple of 32 elements, the buffer cuts into `ranks` such parts.
struct Group {
  std::vector<int64_t> numels;
  std::vector<model::Param> table;  ///< of the same tensors
  bool unit = false;  ///< gathered for use under zero = 3
  int64_t alignment = kAlignment;

  int64_t padded() const {
    int64_t sum = 0;
    for (const int64_t numel : numels) sum += round_up(numel, alignment);
    return sum;
  }
  int64_t length(int64_t ranks) const { return round_up(padded(), alignment * ranks); }
  /// Elements of each tensor, without padding, in the shard of `rank`.
  std::vector<int64_t> parts(int64_t rank, int64_t ranks) const {
    const int64_t begin = rank * (length(ranks) / ranks), end = begin + length(ranks) / ranks;
    std::vector<int64_t> counts;
    int64_t offset = 0;
    for (const int64_t numel : numels) {
      counts.push_back(std::max<int64_t>(0, std::min(offset + numel, end) - std::max(offset, begin)));
      offset += round_up(numel, alignment);
    }
    return counts;
  }
  int64_t owned(int64_t rank, int64_t ranks) const {
    int64_t sum = 0;
    for (const int64_t count : parts(rank, ranks)) sum += count;
    return sum;
  }
};

/// What is reduced together: all (so small a model is one bucket); under zero = 3 each Unit (embedding, layers, head) and the rest.
inline std::vector<Group> groups_of(const config::RunConfig& c) {
  std::vector<Group> groups;  // Units in the order of the module
  std::map<std::string, size_t> found;
  for (const auto& p : model::parameter_table(config::model_spec(c, c.model.vocab))) {
    int64_t numel = 1;
    for (const int64_t size : p.shape) numel *= size;
    const bool unit = c.parallel.zero == 3 && (p.name.rfind("layers.", 0) == 0 || p.name == "tok.weight" || p.name == "head.weight");
    const std::string name = unit ? p.name.substr(0, p.name.find('.', p.name.find('.') + 1)) : "";
    const auto [at, fresh] = found.emplace(name, groups.size());
    if (fresh) groups.emplace_back();
    Group& group = groups[at->second];
    group.unit = unit;
    group.numels.push_back(numel);
    group.table.push_back(p);
    if (c.optimizer.name == "adam8bit") group.alignment = 256;  // where shards are cut, blocks are not
  }
  return groups;
}

/// Bytes that stay between two steps.
struct States {
  int64_t parameters = 0, gradients = 0, optimizer = 0;
  int64_t two_units = 0;  ///< of parameters, while two Units exist
};

/// Bytes of moments of one tensor of which a rank has `part` elements, for optimizers whose Case::optimizer counts masters alone.
inline int64_t moments(const config::OptimizerConfig& o, const model::Param& p, int64_t part) {
  const bool matrix = p.shape.size() == 2, embedding = p.name == "tok.weight" || p.name == "head.weight";
  if (o.moments_dtype == "bf16") return 2 * 2 * part;
  if (o.name == "lion" || o.name == "sgd") return 4 * part;
  if (o.name == "adam8bit") return p.numel() < 4096 ? 8 * part : 2 * part + 2 * 4 * ((part + 255) / 256);
  if (o.name == "adafactor") return matrix ? 4 * (p.shape[0] + p.shape[1]) : 4 * part;
  if (o.name == "muon") return matrix && !embedding ? 4 * part : 8 * part;
  return 0;
}
inline int64_t moments(const config::OptimizerConfig& o, const Group& group, const std::vector<int64_t>& parts) {
  int64_t sum = 0;
  for (size_t i = 0; i < parts.size(); ++i) sum += moments(o, group.table[i], parts[i]);
  return sum;
}

/// One rank, or zero = 0: everything on every rank. One element more per tensor of a flat gradient buffer says whether any rank
/// used it, one per bucket whether all ranks finished.
inline States replicated(const Case& bytes, const Group& all, int64_t ranks) {
  const bool flat = ranks > 1 || bytes.weight != bytes.gradient;
  int64_t numel = 0;
  for (const int64_t n : all.numels) numel += n;
  const auto flags = static_cast<int64_t>(all.numels.size()) + 1;
  return {.parameters = bytes.weight * (flat ? all.padded() : numel),
          .gradients = bytes.gradient * (flat ? all.padded() + flags : numel),
          .optimizer = bytes.optimizer * numel};
}

/// Elements in buffers for full gradients: for groups of at most t elements as many of length t as are among three neighbouring Units,
/// and for the longer ones as many of the longest's, the rest and groups that are no Units always counted; three of each at most;
/// for that t which makes it least.
inline int64_t buffered(const std::vector<Group>& groups, int64_t ranks) {
  std::vector<int64_t> units, lengths;
  for (const Group& group : groups) {
    lengths.push_back(group.length(ranks));
    if (group.unit) units.push_back(lengths.back());
  }
  const auto together = [&](int64_t above, int64_t most) {
    int64_t neighbours = 0, others = 0;
    for (size_t i = 0; i < units.size(); ++i) {
      int64_t here = 0;
      for (size_t k = i; k < std::min(i + 3, units.size()); ++k) here += units[k] > above && units[k] <= most;
      neighbours = std::max(neighbours, here);
    }
    for (const Group& group : groups) others += !group.unit && group.length(ranks) > above && group.length(ranks) <= most;
    return std::min<int64_t>(3, neighbours + others);
  };
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  int64_t least = together(0, longest) * longest;
  for (const int64_t t : lengths) least = std::min(least, together(0, t) * t + together(t, longest) * longest);
  return least;
}

/// zero = 1 to 3.
inline States sharded(const Case& bytes, const std::vector<Group>& groups, int64_t zero, int64_t rank, int64_t ranks) {
  States s;
  int64_t longest_unit = 0;
  for (const Group& group : groups) {
    const int64_t length = group.length(ranks), shard = length / ranks;
    if (group.unit) longest_unit = std::max(longest_unit, length);
    s.parameters += bytes.weight * (group.unit ? shard : length);
    s.gradients += bytes.gradient * (zero == 1 ? length : shard);
    s.optimizer += bytes.optimizer * group.owned(rank, ranks);
  }
  if (zero >= 2) s.gradients += bytes.gradient * buffered(groups, ranks);
  s.two_units = 2 * bytes.weight * longest_unit;
  return s;
}

inline States states_of(const Case& bytes, const config::RunConfig& c, int64_t rank, int64_t ranks) {
  std::vector<Group> groups = groups_of(c);
  if (c.parallel.zero == 0 || ranks == 1) {
    groups.front().alignment = kAlignment;
    States states = replicated(bytes, groups.front(), ranks);
    states.optimizer += moments(c.optimizer, groups.front(), groups.front().numels);
    return states;
  }
  States states = sharded(bytes, groups, c.parallel.zero, rank, ranks);
  for (const Group& group : groups) states.optimizer += moments(c.optimizer, group, group.parts(rank, ranks));
  return states;
}

}  // namespace weft::testing
