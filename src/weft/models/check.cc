#include "weft/models/check.h"

#include <fmt/format.h>

#include "weft/core/error.h"
#include "weft/layout/part.h"

namespace weft::models {
namespace {

void check_positive(Findings& findings, const std::string& where, int64_t value) {
  if (value <= 0) findings.add(where, fmt::format("is {}; it must be positive", value));
}

void check_block(Findings& findings, const std::string& where, const model::BlockSpec& block) {
  const model::AttentionSpec& attention = block.attention;
  if (block.moe) findings.add(where + ".moe", "experts are planned but not built by the runtime", "use a dense model");
  if (attention.latent)
    findings.add(where + ".attention.latent", "latent attention is planned but not built by the runtime", "use grouped queries");
  check_positive(findings, where + ".attention.heads", attention.heads);
  check_positive(findings, where + ".attention.kv_heads", attention.kv_heads);
  check_positive(findings, where + ".attention.head_dim", attention.head_dim);
  check_positive(findings, where + ".mlp.ffn", block.mlp.ffn);
  if (attention.kv_heads > 0 && attention.heads % attention.kv_heads != 0)
    findings.add(where + ".attention.heads", fmt::format("is {}; it must be a multiple of kv_heads = {}", attention.heads, attention.kv_heads));
  if (block.norms != 1 && block.norms != 2 && block.norms != 4)
    findings.add(where + ".norms", fmt::format("is {}; a block has 1, 2 or 4 norms", block.norms));
  if (block.norms == 1 && !block.parallel_residual)
    findings.add(where + ".norms", "is 1; only attention and MLP side by side (parallel_residual) can share a norm");
}

}  // namespace

void check_buildable(const model::ModelSpec& spec, const TransformerOptions& options) {
  Findings findings;
  check_positive(findings, "hidden", spec.hidden);
  check_positive(findings, "vocab", spec.vocab);
  check_positive(findings, "context", spec.context);
  check_positive(findings, "layers", spec.layers());
  if (spec.position == model::PositionKind::alibi)
    findings.add("position", "ALiBi is planned but not built by the runtime", "use rope or learned positions");
  if (spec.mtp_layers > 0)
    findings.add("mtp_layers", fmt::format("is {}; prediction modules are not built by the runtime", spec.mtp_layers), "set it to 0");
  if (!(spec.dropout >= 0.0 && spec.dropout < 1.0))
    findings.add("dropout", fmt::format("is {}; it must be at least 0 and below 1", spec.dropout));
  if (options.dtype != at::kDouble && options.dtype != at::kFloat && options.dtype != at::kBFloat16 &&
      options.dtype != at::kHalf)
    findings.add("dtype", fmt::format("is {}; the runtime computes in fp64, fp32, bf16 or fp16", c10::toString(options.dtype)));
  for (size_t i = 0; i < spec.blocks.size(); ++i) {
    check_block(findings, fmt::format("layers.{}", i), spec.blocks[i]);
    // One rotation table serves all layers.
    if (spec.blocks[i].attention.head_dim != spec.blocks[0].attention.head_dim)
      findings.add(fmt::format("layers.{}.attention.head_dim", i), "differs from layer 0's; layers share one head size");
  }
  if (findings.empty()) layout::check_tp_ranks(spec, options.tp.size(), "tp", findings);
  findings.throw_if_any(fmt::format("model \"{}\"", spec.name));
}

}  // namespace weft::models
