#include "weft/plan/job.h"

#include "weft/cost/block.h"

namespace weft::plan {
namespace {

bool same(const model::BlockSpec& a, const model::BlockSpec& b) {
  const auto& x = a.attention;
  const auto& y = b.attention;
  if (x.heads != y.heads || x.kv_heads != y.kv_heads || x.head_dim != y.head_dim || x.window != y.window) return false;
  if (x.latent.has_value() != y.latent.has_value() || a.moe.has_value() != b.moe.has_value()) return false;
  if (a.mlp.ffn != b.mlp.ffn || a.mlp.gated != b.mlp.gated || a.norms != b.norms) return false;
  return !a.moe || (a.moe->experts == b.moe->experts && a.moe->expert_ffn == b.moe->expert_ffn && a.moe->top_k == b.moe->top_k);
}

ModelSummary::Kind kind_of(const model::ModelSpec& spec, const model::BlockSpec& block) {
  ModelSummary::Kind kind;
  kind.block = block;
  model::ModelSpec one = spec;
  one.blocks = {block};
  one.mtp_layers = 0;
  for (const model::Param& param : model::parameter_table(one)) {
    if (param.layer < 0) continue;
    const double count = static_cast<double>(param.numel());
    if (param.kind == model::ParamKind::expert) kind.expert_parameters += count;
    else if (param.tp_dim >= 0) kind.dense_parameters += count;
    else kind.replicated += count;
  }
  return kind;
}

}  // namespace

ModelSummary ModelSummary::of(const model::ModelSpec& spec, int64_t sequence) {
  ModelSummary summary;
  summary.hidden = static_cast<double>(spec.hidden);
  summary.vocab = static_cast<double>(spec.vocab);
  summary.embedding_parameters = summary.hidden * summary.vocab;
  if (spec.position == model::PositionKind::learned) summary.embedding_parameters += summary.hidden * static_cast<double>(spec.context);
  summary.head_parameters = summary.hidden * summary.vocab;
  summary.tied = spec.tied_head;
  summary.layer_norm = spec.norm == model::NormKind::layer;
  summary.mtp_layers = static_cast<double>(spec.mtp_layers);
  for (const model::BlockSpec& block : spec.blocks) {
    size_t index = 0;
    while (index < summary.kinds.size() && !same(summary.kinds[index].block, block)) ++index;
    if (index == summary.kinds.size()) summary.kinds.push_back(kind_of(spec, block));
    ++summary.kinds[index].count;
    summary.kind_of_layer.push_back(static_cast<int>(index));
  }
  summary.total_parameters = static_cast<double>(model::parameter_count(spec));
  summary.training_flops_causal = cost::training_flops(spec, static_cast<double>(sequence), true);
  summary.training_flops_full = cost::training_flops(spec, static_cast<double>(sequence), false);
  return summary;
}

}  // namespace weft::plan
