#include "weft/plan/export.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "weft/core/error.h"
#include "weft/model/presets.h"

namespace weft::plan {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;

std::string megatron(const SearchRequest& request, const layout::Layout& layout) {
  const model::ModelSpec& spec = request.spec;
  const model::BlockSpec& block = spec.blocks.front();
  std::string out = fmt::format("--num-layers {} --hidden-size {} --ffn-hidden-size {} --num-attention-heads {} --kv-channels {}", spec.layers(), spec.hidden, block.mlp.ffn, block.attention.heads, block.attention.head_dim);
  if (block.attention.kv_heads != block.attention.heads) out += fmt::format(" --group-query-attention --num-query-groups {}", block.attention.kv_heads);
  if (block.mlp.gated) out += " --swiglu";
  if (!spec.tied_head) out += " --untie-embeddings-and-output-weights";
  out += fmt::format(" --seq-length {} --micro-batch-size {} --global-batch-size {}", request.sequence, layout.micro_batch, layout.global_batch);
  out += fmt::format(" --tensor-model-parallel-size {} --pipeline-model-parallel-size {} --context-parallel-size {}", layout.tp, layout.pp, layout.cp);
  if (layout.sequence_parallel) out += " --sequence-parallel";
  if (layout.chunks > 1) {
    if (spec.layers() % (layout.pp * layout.chunks) != 0)
      throw ConfigError(fmt::format("{} layers over {} stages x {} chunks are uneven, which --num-layers-per-virtual-pipeline-stage cannot say; plan with --pp that divides", spec.layers(), layout.pp, layout.chunks));
    out += fmt::format(" --num-layers-per-virtual-pipeline-stage {}", spec.layers() / (layout.pp * layout.chunks));
  }
  if (layout.schedule != "1f1b") throw ConfigError(layout.schedule + " is no schedule of Megatron-LM; plan with --schedule 1f1b");
  if (layout.offload) out += " --optimizer-cpu-offload";
  if (layout.ep > 1) out += fmt::format(" --expert-model-parallel-size {} --expert-tensor-parallel-size {}", layout.ep, layout.etp);
  if (layout.zero == 1) out += " --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather";
  if (layout.zero == 3) out += " --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params";
  if (layout.recompute == layout::Recompute::full) out += " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1";
  if (layout.recompute == layout::Recompute::half) out += fmt::format(" --recompute-granularity full --recompute-method block --recompute-num-layers {}", spec.layers() / layout.pp / 2);
  return out + (request.precision == machine::Precision::fp8 ? " --bf16 --fp8-format hybrid\n" : request.precision == machine::Precision::fp16 ? " --fp16\n" : " --bf16\n");
}

std::string torchtitan(const SearchRequest& request, const layout::Layout& layout) {
  if (layout.zero == 1 || layout.zero == 0) {
    if (layout.dp * layout.cp > 1 && layout.zero == 1) throw ConfigError("torchtitan has no ZeRO-1; plan with --zero 3 or --zero 0");
  }
  if (layout.offload) throw ConfigError("torchtitan offloads parameters too; plan with --no-offload");
  const int64_t shard = layout.zero == 3 ? layout.shard_ranks() / layout.cp : 1;
  const bool whole = layout.shard_group == 0;
  std::string out = fmt::format("--training.seq_len={} --training.local_batch_size={} --training.global_batch_size={}", request.sequence, layout.micro_batch, layout.global_batch);
  out += fmt::format(" --parallelism.data_parallel_shard_degree={} --parallelism.data_parallel_replicate_degree={}", whole ? (layout.zero == 3 ? layout.dp : 1) : shard,
                     whole ? (layout.zero == 3 ? 1 : layout.dp) : layout.dp / std::max<int64_t>(1, shard));
  out += fmt::format(" --parallelism.tensor_parallel_degree={} --parallelism.pipeline_parallel_degree={} --parallelism.context_parallel_degree={}", layout.tp, layout.pp, layout.cp);
  if (layout.pp > 1) out += fmt::format(" --parallelism.pipeline_parallel_schedule={}", layout.schedule == "zb-v" ? "ZBVZeroBubble" : layout.schedule == "zb-h1" ? "InterleavedZeroBubble" : layout.chunks > 1 ? "Interleaved1F1B" : "1F1B");
  const char* mode = layout.recompute == layout::Recompute::full ? "full" : layout.recompute == layout::Recompute::none ? "none" : "selective";
  return out + fmt::format(" --activation_checkpoint.mode={}\n", mode);
}

bool is_preset(const std::string& name) {
  const std::vector<std::string> names = model::preset_names();
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

std::string plan_toml(const SearchRequest& request, const Candidate& candidate, const std::function<bool(const std::string&)>& known) {
  const layout::Layout& layout = candidate.layout;
  const auto quoted = [](const std::string& text) { return "\"" + text + "\""; };
  const bool trains = request.precision == machine::Precision::bf16 || request.precision == machine::Precision::fp32;
  struct Line {
    std::string section, name, value;
    bool usual = false;   ///< says nothing: left out when the runtime has no such key
    bool absent = false;  ///< the configuration that the plan is for says it
  };
  const std::vector<Line> lines = {
      {"model", "preset", quoted(request.spec.name), false, !is_preset(request.spec.name)},
      {"data", "seq", std::to_string(request.sequence)},
      {"train", "global_batch", std::to_string(layout.global_batch)},
      {"train", "micro_batch", std::to_string(layout.micro_batch)},
      {"train", trains ? "dtype" : "precision", quoted(machine::precision_name(request.precision))},
      {"train", "recompute", quoted(layout::recompute_name(layout.recompute)), layout.recompute == layout::Recompute::none},
      {"layout", "dp", std::to_string(layout.dp)},
      {"layout", "tp", std::to_string(layout.tp), layout.tp == 1},
      {"layout", "pp", std::to_string(layout.pp), layout.pp == 1},
      {"layout", "chunks", std::to_string(layout.chunks), layout.chunks == 1},
      {"layout", "cp", std::to_string(layout.cp), layout.cp == 1},
      {"layout", "ep", std::to_string(layout.ep), layout.ep == 1},
      {"layout", "schedule", quoted(layout.chunks > 1 && layout.schedule == "1f1b" ? "interleaved" : layout.schedule), layout.pp == 1},
      {"layout", "offload", layout.offload ? "true" : "false", !layout.offload},
      {"parallel", "zero", std::to_string(layout.zero)},
      {"parallel", "dp_shard", std::to_string(layout.shard_group), layout.shard_group == 0},
      {"parallel", "sequence_parallel", layout.sequence_parallel ? "true" : "false", layout.tp == 1, layout.tp == 1},
  };
  std::string out = fmt::format("# weft plan: {} on {} x {}\n# predicted: {:.4g} s a step, {:.0f} tok/s, {:.1f} GiB on the fullest rank (fits with {:.0f}%)\n", request.spec.name, request.devices,
                                request.machine.device.name, candidate.time.step, candidate.tokens_per_second, candidate.memory.device() / kGiB, 100 * candidate.memory.fit_probability);
  std::string section;
  for (const Line& line : lines) {
    const bool live = known(line.section + "." + line.name);
    if (line.absent || (!live && line.usual)) continue;
    if (line.section != section) out += fmt::format("\n[{}]\n", section = line.section);
    out += fmt::format("{}{} = {}{}\n", live ? "" : "# ", line.name, line.value, live ? "" : "   (no key of weft train)");
  }
  return out;
}

std::string export_flags(const std::string& target, const SearchRequest& request, const Candidate& candidate) {
  if (target == "megatron") return megatron(request, candidate.layout);
  if (target == "torchtitan") return torchtitan(request, candidate.layout);
  throw ConfigError("--export " + target + ": use megatron or torchtitan");
}

}  // namespace weft::plan
