#include "weft/layout/part.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string_view>

namespace weft::layout {
namespace {

bool has_part(std::string_view name, std::string_view part) { return name.find(part) != std::string_view::npos; }

/// Whole heads, in elements of the projections.
Part in_elements(const Part& heads, int64_t head_dim) { return {heads.begin * head_dim, heads.size * head_dim}; }

}  // namespace

bool heads_fit(const model::AttentionSpec& attention, int64_t ranks) {
  if (attention.kv_heads < 1) return attention.heads % ranks == 0;
  if (ranks <= attention.kv_heads) return true;
  return ranks % attention.kv_heads == 0 && ranks <= attention.heads;
}

HeadCounts most_heads(const model::AttentionSpec& attention, int64_t ranks) {
  const auto above = [](int64_t count, int64_t of) { return (count + of - 1) / of; };
  if (attention.kv_heads < 1) return {static_cast<double>(above(attention.heads, ranks)), 0};
  const int64_t group = attention.heads / attention.kv_heads;
  if (ranks <= attention.kv_heads) {
    const int64_t keys = above(attention.kv_heads, ranks);
    return {static_cast<double>(keys * group), static_cast<double>(keys)};
  }
  return {static_cast<double>(above(attention.heads, ranks)), 1};
}

HeadPart head_part(const model::AttentionSpec& attention, int64_t ranks, int64_t rank) {
  const int64_t group = attention.heads / attention.kv_heads;  // query heads of a key head
  if (ranks <= attention.kv_heads) {
    const Part keys = part_of(attention.kv_heads, ranks, rank);
    return {.queries = {keys.begin * group, keys.size * group}, .keys = keys, .copies = 1};
  }
  const int64_t copies = ranks / attention.kv_heads, key = rank / copies;
  const Part queries = part_of(group, copies, rank % copies);
  return {.queries = {key * group + queries.begin, queries.size}, .keys = {key, 1}, .copies = copies};
}

void check_tp_ranks(const model::ModelSpec& spec, int64_t ranks, const std::string& where, Findings& findings) {
  if (ranks <= 1) return;
  for (const model::BlockSpec& block : spec.blocks) {
    const model::AttentionSpec& attention = block.attention;
    if (!heads_fit(attention, ranks)) {
      std::vector<int64_t> legal;
      for (int64_t n = 1; n <= attention.heads; ++n) {
        if (heads_fit(attention, n)) legal.push_back(n);
      }
      return findings.add(where, fmt::format("{} ranks cannot share out {} query heads over {} key heads", ranks, attention.heads, attention.kv_heads),
                          fmt::format("legal: up to the number of key heads, or a multiple of it up to the query heads: {}", fmt::join(legal, ", ")));
    }
    if (!block.moe && block.mlp.ffn < ranks) findings.add(where, fmt::format("{} ranks for an MLP of width {}", ranks, block.mlp.ffn), "use fewer");
  }
  if (spec.vocab > 0 && spec.vocab < ranks) findings.add(where, fmt::format("{} ranks for a vocabulary of {}", ranks, spec.vocab), "use fewer");
}

ParamPart param_part(const model::Param& param, const model::ModelSpec& spec, int64_t ranks, int64_t rank) {
  if (param.tp_dim < 0 || ranks == 1) return {.dim = -1, .part = {}, .copies = ranks};
  ParamPart result{.dim = param.tp_dim, .part = part_of(param.shape[static_cast<size_t>(param.tp_dim)], ranks, rank), .copies = 1};
  if (!has_part(param.name, ".attn.")) return result;
  const model::AttentionSpec& attention = spec.blocks[static_cast<size_t>(param.layer)].attention;
  const HeadPart heads = head_part(attention, ranks, rank);
  const bool keys = has_part(param.name, ".wk.") || has_part(param.name, ".wv.");
  result.part = in_elements(keys ? heads.keys : heads.queries, attention.head_dim);
  result.copies = keys ? heads.copies : 1;
  return result;
}

}  // namespace weft::layout
