#include "weft/layout/layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "weft/layout/part.h"

namespace weft::layout {
namespace {

void check_positive(Findings& findings, const char* name, int64_t value) {
  if (value < 1) findings.add(name, fmt::format("{}; the rule is {} >= 1", value, name), "use 1 for none");
}

void check_heads(Findings& findings, const Layout& layout, const model::ModelSpec& spec) {
  check_tp_ranks(spec, layout.tp, "tp", findings);  // as the runtime cuts layers
}

void check_experts(Findings& findings, const Layout& layout, const model::ModelSpec& spec) {
  int64_t experts = 0;
  for (const model::BlockSpec& block : spec.blocks)
    if (block.moe) experts = std::max(experts, block.moe->experts);
  if (layout.ep * layout.etp == 1) return;
  if (experts == 0) {
    findings.add("ep", fmt::format("{}, but {} has no experts", layout.ep * layout.etp, spec.name), "ep = 1 and etp = 1");
    return;
  }
  if (experts % layout.ep != 0)
    findings.add("ep", fmt::format("{} does not divide the {} experts", layout.ep, experts), "ep = " + nearest_divisors(experts, layout.ep));
  const int64_t ranks = layout.dp * layout.cp * layout.tp;
  if (ranks % (layout.ep * layout.etp) != 0)
    findings.add("ep", fmt::format("ep * etp = {} does not divide dp * cp * tp = {}", layout.ep * layout.etp, ranks),
                 "ep * etp = " + nearest_divisors(ranks, layout.ep * layout.etp));
}

void check_batch(Findings& findings, const Layout& layout) {
  const int64_t per_step = layout.dp * layout.micro_batch;
  if (layout.global_batch % per_step == 0) return;
  const int64_t below = layout.global_batch / per_step * per_step;
  findings.add("global batch", fmt::format("{} is not a multiple of dp * micro-batch = {} * {} = {}", layout.global_batch, layout.dp, layout.micro_batch, per_step),
               below > 0 ? fmt::format("use {} or {}", below, below + per_step) : fmt::format("use {}", per_step));
}

}  // namespace

const char* recompute_name(Recompute recompute) {
  switch (recompute) {
    case Recompute::none: return "none";
    case Recompute::attention: return "attention";
    case Recompute::half: return "half";
    case Recompute::full: return "full";
  }
  return "none";
}

std::string Layout::text() const {
  std::string out = fmt::format("tp{}{}", tp, sequence_parallel && tp > 1 ? "+sp" : "");
  if (pp > 1) out += chunks > 1 ? fmt::format(" pp{}x{}", pp, chunks) : fmt::format(" pp{}", pp);
  if (cp > 1) out += fmt::format(" cp{}", cp);
  if (ep > 1) out += fmt::format(" ep{}", ep);
  if (etp > 1) out += fmt::format(" etp{}", etp);
  out += fmt::format(" dp{} zero{}", dp, zero);
  if (shard_group > 0 && shard_group < dp * cp) out += fmt::format("/{}", shard_group);
  out += fmt::format(" mb{}", micro_batch);
  if (recompute != Recompute::none) out += fmt::format(" rc:{}", recompute_name(recompute));
  if (pp > 1 && schedule != "1f1b" && schedule != "interleaved") out += " " + schedule;
  if (offload) out += " offload";
  return out;
}

Findings check(const Layout& layout, const model::ModelSpec& spec) {
  Findings findings;
  check_positive(findings, "pp", layout.pp);
  check_positive(findings, "chunks", layout.chunks);
  check_positive(findings, "dp", layout.dp);
  check_positive(findings, "cp", layout.cp);
  check_positive(findings, "tp", layout.tp);
  check_positive(findings, "ep", layout.ep);
  check_positive(findings, "etp", layout.etp);
  check_positive(findings, "micro-batch", layout.micro_batch);
  check_positive(findings, "global batch", layout.global_batch);
  if (layout.zero < 0 || layout.zero > 3) findings.add("zero", fmt::format("{} is not a stage; the rule is 0 <= zero <= 3", layout.zero), "0 = DDP ... 3 = FSDP");
  if (spec.blocks.empty()) findings.add("model", "has no blocks", "give layers >= 1");
  if (!findings.empty()) return findings;
  check_heads(findings, layout, spec);
  check_experts(findings, layout, spec);
  check_batch(findings, layout);
  if (layout.chunks > 1 && layout.pp == 1) findings.add("chunks", fmt::format("{} chunks need more than one stage", layout.chunks), "chunks = 1 or pp >= 2");
  if (layout.pp * layout.chunks > spec.layers())
    findings.add("pp", fmt::format("pp * chunks = {} * {} = {} parts for {} layers", layout.pp, layout.chunks, layout.pp * layout.chunks, spec.layers()),
                 fmt::format("pp * chunks <= {}", spec.layers()));
  if (layout.shard_group > 0 && (layout.dp * layout.cp) % layout.shard_group != 0)
    findings.add("shard group", fmt::format("{} does not divide dp * cp = {}", layout.shard_group, layout.dp * layout.cp),
                 "shard group = " + nearest_divisors(layout.dp * layout.cp, layout.shard_group));
  return findings;
}

namespace {

/// Blocks of each rank when the last one computes `last` blocks besides: whole numbers nearest to equal loads, the surplus to
/// the ranks in the middle.
std::vector<int64_t> blocks_of_ranks(int64_t layers, int64_t pp, double last) {
  const double load = (static_cast<double>(layers) + last) / static_cast<double>(pp);
  std::vector<int64_t> blocks(static_cast<size_t>(pp), static_cast<int64_t>(load));
  blocks.back() = std::clamp<int64_t>(std::llround(load - last), 1, layers);
  int64_t extra = layers - blocks.back() - static_cast<int64_t>(load) * (pp - 1);
  for (size_t rank = 1; extra > 0; rank = (rank + 1) % (blocks.size() - 1), --extra) ++blocks[rank];
  for (size_t rank = 0; extra < 0; rank = (rank + 1) % (blocks.size() - 1))
    if (blocks[rank] > 1) --blocks[rank], ++extra;
  return blocks;
}

}  // namespace

std::vector<int64_t> split_layers(int64_t layers, int64_t pp, int64_t chunks, double last) {
  const int64_t parts = pp * chunks;
  std::vector<int64_t> count(static_cast<size_t>(parts), layers / parts);
  int64_t extra = layers % parts;
  if (extra > 0 && last > 0 && pp > 1) {
    const std::vector<int64_t> blocks = blocks_of_ranks(layers, pp, last);
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t rank = part % pp, chunk = part / pp;
      // The first rank's surplus goes to later chunks, everyone else's to earlier ones: the model's ends stay short.
      const int64_t place = rank == 0 ? chunks - 1 - chunk : chunk;
      count[static_cast<size_t>(part)] = blocks[static_cast<size_t>(rank)] / chunks + (place < blocks[static_cast<size_t>(rank)] % chunks ? 1 : 0);
    }
    return count;
  }
  // Middle parts first: the last part holds the head, the first the embedding.
  for (int64_t part = 1; part + 1 < parts && extra > 0; ++part, --extra) ++count[static_cast<size_t>(part)];
  if (extra > 0) ++count.front();
  return count;
}

std::vector<int64_t> divisors(int64_t value) {
  std::vector<int64_t> low, high;
  for (int64_t d = 1; d * d <= value; ++d) {
    if (value % d != 0) continue;
    low.push_back(d);
    if (d != value / d) high.push_back(value / d);
  }
  low.insert(low.end(), high.rbegin(), high.rend());
  return low;
}

std::string nearest_divisors(int64_t value, int64_t wanted) {
  int64_t below = 1, above = value;
  for (int64_t d : divisors(value)) {
    if (d <= wanted) below = d;
    if (d >= wanted) { above = d; break; }
  }
  return below == above ? fmt::format("{}", below) : fmt::format("{} or {}", below, above);
}

}  // namespace weft::layout
