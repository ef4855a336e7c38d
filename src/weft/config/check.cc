#include "weft/config/check.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <sstream>

#include "weft/core/units.h"
#include "weft/layout/part.h"
#include "weft/model/presets.h"
#include "weft/schedule/generate.h"

namespace weft::config {
namespace {

/// Rounds the MLP of a llama up: kernels like widths that are multiples of it.
constexpr int64_t kFfnMultiple = 32;

int64_t pick(int64_t value, int64_t otherwise) {
  return value > 0 ? value : otherwise;
}

/// The family's style with sizes still open. The smallest preset of a family is its style with sizes to be replaced.
model::ModelSpec family_style(const ModelConfig& model) {
  model::ModelSpec spec = model::preset(model.family + "-tiny");
  spec.name = "custom";
  spec.rope.theta = 10000.0;
  spec.hidden = spec.vocab = spec.context = 0;
  model::BlockSpec block = spec.blocks.front();
  block.attention.heads = block.attention.kv_heads = block.attention.head_dim = block.mlp.ffn = 0;
  spec.blocks.assign(static_cast<size_t>(model.layers), block);
  return spec;
}

int64_t default_ffn(const std::string& family, int64_t hidden) {
  if (family == "gpt2") return 4 * hidden;
  return (8 * hidden / 3 + kFfnMultiple - 1) / kFfnMultiple * kFfnMultiple;
}

void apply_sizes(const ModelConfig& model, model::ModelSpec& spec) {
  if (model.layers > 0 && !spec.blocks.empty())
    spec.blocks.resize(static_cast<size_t>(model.layers), spec.blocks.front());
  const bool other_width = model.hidden > 0 || model.heads > 0;
  spec.hidden = pick(model.hidden, spec.hidden);
  for (model::BlockSpec& block : spec.blocks) {
    auto& attention = block.attention;
    attention.heads = pick(model.heads, attention.heads);
    attention.kv_heads =
        pick(model.kv_heads, model.heads > 0 || attention.kv_heads == 0 ? attention.heads : attention.kv_heads);
    const int64_t even_split = attention.heads > 0 ? spec.hidden / attention.heads : 0;
    attention.head_dim = pick(model.head_dim, other_width || attention.head_dim == 0 ? even_split : attention.head_dim);
    block.mlp.ffn =
        pick(model.ffn, model.hidden > 0 || block.mlp.ffn == 0 ? default_ffn(spec.family, spec.hidden) : block.mlp.ffn);
  }
  if (model.tied_head != "auto") spec.tied_head = model.tied_head == "yes";
  if (model.rope_theta > 0) spec.rope.theta = model.rope_theta;
  if (model.dropout > 0) spec.dropout = model.dropout;
  if (model.init_std > 0) spec.init_std = model.init_std;
}

/// Far beyond any model, and small enough that bytes and FLOPs stay within 63 bits.
constexpr double kMostParameters = 1e15;

/// In floating point, so that it is right to a few percent where the exact count would overflow.
double approximate_parameters(const model::ModelSpec& spec) {
  const auto hidden = static_cast<double>(spec.hidden);
  double total = 2.0 * static_cast<double>(spec.vocab) * hidden;
  for (const model::BlockSpec& block : spec.blocks) {
    const auto& a = block.attention;
    const double heads = 2.0 * static_cast<double>(a.heads) + 2.0 * static_cast<double>(a.kv_heads);
    total += hidden * (heads * static_cast<double>(a.head_dim) + 3.0 * static_cast<double>(block.mlp.ffn));
  }
  return total;
}

void check_sizes(const RunConfig& config, const model::ModelSpec& spec, int64_t data_vocab, Findings& findings) {
  auto need = [&](const char* key, int64_t value) {
    if (value < 1) findings.add(key, "missing, and no preset gives it", fmt::format("set {} or model.preset", key));
    return value >= 1;
  };
  need("model.vocab", spec.vocab);
  const bool hidden = need("model.hidden", spec.hidden);
  if (!need("model.layers", spec.layers())) return;
  const auto& attention = spec.blocks.front().attention;
  if (!need("model.heads", attention.heads) || !hidden) return;
  if (config.model.head_dim == 0 && attention.head_dim * attention.heads != spec.hidden &&
      config.model.preset.empty()) {
    findings.add("model.heads", fmt::format("{} heads do not divide hidden = {}", attention.heads, spec.hidden),
                 "or set model.head_dim");
  }
  if (attention.heads % attention.kv_heads != 0) {
    findings.add("model.kv_heads", fmt::format("{} does not divide heads = {}", attention.kv_heads, attention.heads));
  }
  if (spec.position == model::PositionKind::rope && attention.head_dim % 2 != 0) {
    findings.add("model.head_dim", fmt::format("{} is odd; rotary positions turn pairs", attention.head_dim));
  }
  if (config.data.seq > spec.context) {
    findings.add("data.seq", fmt::format("{} tokens exceed the model's context of {}", config.data.seq, spec.context),
                 "set model.context");
  }
  if (attention.heads % attention.kv_heads == 0) layout::check_tp_ranks(spec, config.layout.tp, "layout.tp", findings);
  const int64_t stages = config.layout.pp * pipeline_chunks(config);
  if (stages > spec.layers() + 2) {
    findings.add("layout.pp", fmt::format("{} stages (ranks x chunks), and the model has {} parts: embedding, {} layers, head", stages, spec.layers() + 2, spec.layers()),
                 "use fewer ranks or parallel.chunks");
  }
  const bool split = config.parallel.schedule == "zb-h1" || config.parallel.schedule == "zb-v" || config.parallel.schedule == "dualpipe-v";
  if (config.layout.pp > 1 && config.parallel.tp_overlap > 1 && split) {
    findings.add("parallel.tp_overlap", fmt::format("{}; {} computes weight gradients later than input gradients, and products that overlap with "
                                                    "their communication make both at once", config.parallel.tp_overlap, config.parallel.schedule),
                 "set it to 1, or take parallel.schedule = \"1f1b\"");
  }
  const double parameters = approximate_parameters(spec);
  if (parameters > kMostParameters) {
    findings.add("model", fmt::format("about {:.1e} parameters; the largest model that is handled has {:.0e}", parameters, kMostParameters),
                 "check model.hidden, model.ffn, model.layers and model.vocab");
  }
  if (data_vocab > spec.vocab) {
    findings.add("model.vocab", fmt::format("{} is less than the data's vocabulary of {}", spec.vocab, data_vocab),
                 "leave it out to take the data's");
  }
}

/// Groups of ranks of equal sizes.
void check_groups(const ParallelConfig& parallel, int64_t ranks, Findings& findings) {
  if (parallel.dp_shard > 0 && ranks % parallel.dp_shard != 0) {
    return findings.add("parallel.dp_shard", fmt::format("{} ranks do not divide into replicas of {}", ranks, parallel.dp_shard),
                        fmt::format("legal values: {}, or 0 for all", fmt::join(divisors(ranks), ", ")));
  }
  const int64_t shards = parallel.dp_shard > 0 ? parallel.dp_shard : ranks;
  if (parallel.reshard_group == 0 || parallel.zero != 3) return;
  std::vector<int64_t> legal = divisors(shards);
  std::erase_if(legal, [shards](int64_t size) { return size == 1 || size == shards; });
  if (std::find(legal.begin(), legal.end(), parallel.reshard_group) != legal.end()) return;
  findings.add("parallel.reshard_group",
               fmt::format("{} ranks cannot hold one copy between them where {} share the parameters out", parallel.reshard_group, shards),
               legal.empty() ? "legal value: 0" : fmt::format("legal values: {}, or 0", fmt::join(legal, ", ")));
}

void check_optimizer(const RunConfig& config, Findings& findings) {
  const OptimizerConfig& o = config.optimizer;
  constexpr double kMostRate = 1;  // but for sgd each update moves every weight by about lr, or by that share of it
  if (o.name != "sgd" && o.lr > kMostRate) {
    findings.add("optimizer.lr", fmt::format("{} with {}, which moves every weight by about that in each update; at most {}", o.lr, o.name,
                                             kMostRate), "usual are 1e-5 to 1e-2");
  }
  if (o.momentum < 0 && o.momentum != -1) findings.add("optimizer.momentum", fmt::format("{} is neither -1 nor at least 0", o.momentum));
  if (o.moments_dtype == "bf16") {
    constexpr double kMostBeta = 0.992;  // optim::AdamW::keep_moments_in_bf16
    if (o.name != "adamw") findings.add("optimizer.moments_dtype", "bf16 with " + o.name, "it is for adamw; leave it at auto");
    if (std::max(o.beta1, o.beta2) > kMostBeta) {
      findings.add("optimizer.moments_dtype", fmt::format("bf16 with a beta of {}: in bf16 a moment that moves that little stands still",
                                                          std::max(o.beta1, o.beta2)), "use betas up to 0.992, or auto");
    }
  }
  rate_rules(o, findings);
  if (config.schedule.decay > config.train.steps) {
    findings.add("schedule.decay", fmt::format("{} steps of decay in a run of train.steps = {}", config.schedule.decay, config.train.steps));
  }
}

void check_pipeline(const RunConfig& config, Findings& findings) {
  if (config.layout.pp == 1) {
    if (config.parallel.chunks > 1) {
      findings.add("parallel.chunks", fmt::format("{} with layout.pp = 1: there is no pipeline", config.parallel.chunks), "set layout.pp, or leave it out");
    }
    return;
  }
  const schedule::Generator& generator = schedule::find_generator(config.parallel.schedule);
  const schedule::Sizes sizes{.ranks = static_cast<int>(config.layout.pp), .micro_batches = 1, .chunks = static_cast<int>(pipeline_chunks(config))};
  for (const Finding& finding : schedule::check(generator, sizes, "parallel.").items()) findings.add(finding.where, finding.what, finding.remedy);
}

void check_offload(const RunConfig& config, Findings& findings) {
  const OffloadConfig& offload = config.offload;
  if (offload.optimizer == "nvme" && offload.dir.empty()) {
    findings.add("offload.dir", "missing with offload.optimizer = nvme", "name a folder on a local disk");
  }
  if (offload.optimizer != "nvme" && !offload.dir.empty()) {
    findings.add("offload.dir", fmt::format("{} with offload.optimizer = {}, which writes no files", offload.dir, offload.optimizer),
                 "leave it out, or set offload.optimizer = nvme");
  }
  if (offload.parameters == "nvme") {
    findings.add("offload.parameters", "nvme: parameters are not kept in files. Ranks read each other's parts in place, forward and backward, so that one "
                                       "rank's disk would hold up all; most of what a rank holds is the optimizer's state",
                 "use cpu or none, and offload.optimizer = nvme");
  }
  if (offload.parameters == "cpu" && config.parallel.zero < 3) {
    findings.add("offload.parameters", fmt::format("cpu with parallel.zero = {}, under which every rank keeps all parameters where they are used",
                                                   config.parallel.zero), "set parallel.zero = 3, or leave it out");
  }
  const std::string& name = config.optimizer.name;
  if (offload.optimizer != "none" && !can_offload(name)) {
    findings.add("offload.optimizer", fmt::format("{} with optimizer.name = {}, which needs whole matrices or rows; pieces are what is streamed",
                                                  offload.optimizer, name), "use adamw, adam8bit, lion or sgd, or offload.optimizer = none");
  }
}

}  // namespace

std::vector<RateRule> rate_rules(const OptimizerConfig& optimizer, Findings& findings) {
  std::vector<RateRule> rules;
  std::istringstream text(optimizer.rates);
  for (std::string part; std::getline(text, part, ';');) {
    std::erase(part, ' ');
    if (part.empty()) continue;
    constexpr double kMost = 1000;
    const size_t sign = part.find('=');
    const std::string number = sign == std::string::npos ? "" : part.substr(sign + 1);
    RateRule rule{.names = part.substr(0, sign)};
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), rule.share);
    const bool good = error == std::errc() && end == number.data() + number.size() && rule.share >= 0 && rule.share <= kMost && !rule.names.empty();
    if (!good) {
      findings.add("optimizer.rates", fmt::format("\"{}\" is not names = share, with a share from 0 to {}", part, kMost),
                   "for instance \"head.*=0.5; *.norm*.*=0.1\"");
      continue;
    }
    rules.push_back(std::move(rule));
  }
  return rules;
}

int64_t pipeline_chunks(const RunConfig& config) {
  if (config.layout.pp == 1) return 1;
  return config.parallel.chunks > 0 ? config.parallel.chunks : schedule::find_generator(config.parallel.schedule).default_chunks;
}

double momentum(const OptimizerConfig& optimizer) {
  constexpr double kSgd = 0.9, kMuon = 0.95;
  return optimizer.momentum >= 0 ? optimizer.momentum : optimizer.name == "muon" ? kMuon : kSgd;
}

int64_t decay_steps(const RunConfig& config) {
  constexpr int64_t kShare = 10;
  return config.schedule.decay >= 0 ? config.schedule.decay : config.train.steps / kShare;
}

bool can_offload(const std::string& optimizer) { return optimizer != "muon" && optimizer != "adafactor"; }

void check(const RunConfig& config, Findings& findings) {
  if (config.data.train.empty()) findings.add("data.train", "missing", "name a token file made by `weft data prepare`");
  if (config.train.dtype == "fp64") {
    for (const auto& [key, value] : {std::pair("train.gradient_dtype", config.train.gradient_dtype),
                                     std::pair("train.reduce_dtype", config.train.reduce_dtype)}) {
      if (value != "auto") findings.add(key, value + " with train.dtype = fp64 would lose what fp64 is for", "leave it at auto");
    }
  }
  if (config.parallel.dp_shard > 0 && config.parallel.zero == 0) {
    findings.add("parallel.dp_shard", fmt::format("{} with parallel.zero = 0, under which nothing is shared out", config.parallel.dp_shard),
                 "leave it out, or set parallel.zero to 1, 2 or 3");
  }
  if (config.parallel.reshard_group > 0 && (config.parallel.zero != 3 || !config.parallel.reshard_after_forward)) {
    findings.add("parallel.reshard_group", fmt::format("{} without parallel.zero = 3 and parallel.reshard_after_forward = true, which it "
                                                       "is a kind of", config.parallel.reshard_group),
                 "leave it out, or set them");
  }
  if (config.train.recompute != "none" && config.train.offload_activations) {
    findings.add("train.offload_activations", "true with train.recompute = " + config.train.recompute + ", which leaves nothing to offload",
                 "leave out one of the two");
  }
  if (config.parallel.tp_overlap > 1 && config.layout.tp == 1) {
    findings.add("parallel.tp_overlap", fmt::format("{} with layout.tp = 1: nothing travels that could overlap", config.parallel.tp_overlap), "set layout.tp, or leave it out");
  }
  if (config.parallel.tp_overlap > 1 && (config.train.recompute == "keep_matmuls" || config.train.recompute == "half")) {
    findings.add("train.recompute", fmt::format("{} keeps matrix products, which parallel.tp_overlap = {} makes one with their communication", config.train.recompute, config.parallel.tp_overlap),
                 "none, attention, keep_attention or full, or no overlap");
  }
  if (config.parallel.sequence_parallel && config.layout.tp == 1) {
    findings.add("parallel.sequence_parallel", "true with layout.tp = 1: there is no rank to share the sequence with", "set layout.tp, or leave it out");
  }
  if (config.parallel.sequence_parallel && config.data.seq % config.layout.tp != 0) {
    const int64_t above = (config.data.seq / config.layout.tp + 1) * config.layout.tp;
    findings.add("data.seq", fmt::format("{} tokens do not divide into layout.tp = {} parts, as parallel.sequence_parallel cuts them", config.data.seq,
                                         config.layout.tp), fmt::format("nearest: {} and {}", above - config.layout.tp, above));
  }
  check_pipeline(config, findings);
  check_optimizer(config, findings);
  check_offload(config, findings);
  constexpr double kLeastClipNorm = 1e-6;  // below it nothing is left of a gradient in fp32
  if (config.optimizer.clip_norm > 0 && config.optimizer.clip_norm < kLeastClipNorm) {
    findings.add("optimizer.clip_norm", fmt::format("{} would leave nothing of any gradient; at least {}", config.optimizer.clip_norm,
                                                    kLeastClipNorm), "0 = no clipping, usual is 1");
  }
  if (config.run.dir.empty()) findings.add("run.dir", "empty", "name a folder for the run's files");
  if (config.schedule.warmup > config.train.steps) {
    findings.add("schedule.warmup", fmt::format("{} steps of warm-up in a run of train.steps = {}",
                                                config.schedule.warmup, config.train.steps));
  }
  constexpr double kMostTokensPerStep = 1e9;  // an order above the largest published batch
  const double tokens = static_cast<double>(config.train.global_batch) * static_cast<double>(config.data.seq);
  if (tokens > kMostTokensPerStep) {
    findings.add("train.global_batch", fmt::format("{} samples of data.seq = {} tokens are {:.1e} tokens per step; at most {:.0e}",
                                                   config.train.global_batch, config.data.seq, tokens, kMostTokensPerStep));
  }
  if (config.train.micro_batch > config.train.global_batch) {
    findings.add("train.micro_batch", fmt::format("{} is more than train.global_batch = {}", config.train.micro_batch,
                                                  config.train.global_batch));
  }
}

model::ModelSpec model_spec(const RunConfig& config, int64_t data_vocab) {
  const bool named = !config.model.preset.empty();
  model::ModelSpec spec = named ? model::preset(config.model.preset) : family_style(config.model);
  apply_sizes(config.model, spec);
  spec.vocab = pick(config.model.vocab, pick(data_vocab, spec.vocab));
  spec.context = pick(config.model.context, pick(spec.context, config.data.seq));
  Findings findings;
  check_sizes(config, spec, data_vocab, findings);
  findings.throw_if_any("model");
  return spec;
}

int64_t warmup_steps(const RunConfig& config) {
  constexpr int64_t kMost = 100, kShare = 10;
  return config.schedule.warmup >= 0 ? config.schedule.warmup : std::min(kMost, config.train.steps / kShare);
}

Accumulation accumulation(const RunConfig& config, int64_t ranks, Findings& findings) {
  Accumulation result;
  const int64_t tp = config.layout.tp, pp = config.layout.pp;
  if (ranks % (tp * pp) != 0 && pp > 1) {
    findings.add("layout.pp", fmt::format("{} ranks do not divide into {} pipeline x {} tensor-parallel ranks", ranks, pp, tp),
                 fmt::format("legal products: {}", fmt::join(divisors(ranks), ", ")));
    return result;
  }
  if (ranks % tp != 0) {
    findings.add("layout.tp", fmt::format("{} ranks do not divide into groups of {}", ranks, tp),
                 fmt::format("legal values: {}", fmt::join(divisors(ranks), ", ")));
    return result;
  }
  result.dp = pick(config.layout.dp, ranks / (tp * pp));
  if (result.dp * tp * pp != ranks) {
    findings.add("layout.dp", fmt::format("{} data-parallel{} ranks, but the program runs on {}", result.dp,
                                          (tp > 1 ? fmt::format(" x {} tensor-parallel", tp) : "") + (pp > 1 ? fmt::format(" x {} pipeline", pp) : ""), ranks),
                 fmt::format("start it with `weft run -n {0} -- weft train ...`, or leave layout.dp out", result.dp * tp * pp));
    return result;
  }
  check_groups(config.parallel, result.dp, findings);
  const int64_t batch = config.train.global_batch;
  if (batch % result.dp != 0) {
    const int64_t lower = batch / result.dp * result.dp, upper = lower + result.dp;
    findings.add("train.global_batch", fmt::format("{} samples do not divide into {} equal shares", batch, result.dp),
                 lower > 0 ? fmt::format("nearest: {} and {}", lower, upper) : fmt::format("nearest: {}", upper));
    return result;
  }
  result.per_rank = batch / result.dp;
  result.micro_batch = std::min(pick(config.train.micro_batch, result.per_rank), result.per_rank);
  result.steps = (result.per_rank + result.micro_batch - 1) / result.micro_batch;
  return result;
}

}  // namespace weft::config
