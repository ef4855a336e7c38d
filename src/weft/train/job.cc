#include "weft/train/job.h"

#include <fmt/format.h>

#include "weft/core/error.h"

namespace weft::train {
namespace {

data::TokenFile open_data(const config::RunConfig& config, const std::string& path) {
  return data::TokenFile::open(path, data::token_format(config.data.format), config.model.vocab);
}

void check_pair(const data::TokenFile& train, const data::TokenFile& val) {
  Findings findings;
  if (train.info().vocab != val.info().vocab || train.info().tokenizer != val.info().tokenizer) {
    findings.add("data.val",
                 fmt::format("{} has tokenizer '{}' with {} ids, {} has '{}' with {}", val.path(), val.info().tokenizer,
                             val.info().vocab, train.path(), train.info().tokenizer, train.info().vocab),
                 "prepare both with one tokenizer");
  }
  findings.throw_if_any("data");
}

/// Writes what was derived back into the configuration, so that the copy in the run folder says it.
config::RunConfig as_used(config::RunConfig config, const model::ModelSpec& spec,
                          const config::Accumulation& accumulation) {
  config.model.vocab = spec.vocab;
  config.model.context = spec.context;
  config.model.layers = spec.layers();
  config.model.hidden = spec.hidden;
  const model::BlockSpec& block = spec.blocks.front();
  config.model.heads = block.attention.heads;
  config.model.kv_heads = block.attention.kv_heads;
  config.model.head_dim = block.attention.head_dim;
  config.model.ffn = block.mlp.ffn;
  config.model.tied_head = spec.tied_head ? "yes" : "no";
  config.schedule.warmup = config::warmup_steps(config);
  config.layout.dp = accumulation.dp;
  config.train.micro_batch = accumulation.micro_batch;
  return config;
}

}  // namespace

at::ScalarType scalar_type(const std::string& name) {
  if (name == "fp64") return at::kDouble;
  if (name == "bf16") return at::kBFloat16;
  return at::kFloat;
}

Job make_job(const config::RunConfig& config, int64_t ranks) {
  Findings findings;
  config::check(config, findings);
  const config::Accumulation accumulation = config::accumulation(config, ranks, findings);
  findings.throw_if_any("configuration");

  const data::TokenFile train = open_data(config, config.data.train);
  const model::ModelSpec spec = config::model_spec(config, train.info().vocab);
  Job job{.config = as_used(config, spec, accumulation),
          .spec = spec,
          .accumulation = accumulation,
          .dtype = scalar_type(config.train.dtype),
          .tokenizer = train.info().tokenizer,
          .train = data::TokenSamples(train, config.data.seq),
          .val = std::nullopt};
  if (!config.data.val.empty()) {
    const data::TokenFile val = open_data(config, config.data.val);
    check_pair(train, val);
    job.val.emplace(val, config.data.seq);
  }
  return job;
}

WorldOptions world_options(const config::RunConfig& config) {
  WorldOptions options;
  if (config.layout.backend == "local") options.backend = BackendKind::local;
  if (config.layout.backend == "gloo") options.backend = BackendKind::gloo;
  options.timeout = std::chrono::seconds(config.layout.timeout_s);
  return options;
}

std::string describe(const Job& job) {
  const auto& c = job.config;
  const auto& a = job.accumulation;
  const int64_t parameters = model::parameter_count(job.spec);
  // Stored per parameter: weights, gradients, two moments of AdamW; with bf16 also fp32 master weights.
  const bool mixed = job.dtype == at::kBFloat16;
  const int64_t wide = job.dtype == at::kDouble ? 8 : 4;
  const int64_t states = c.optimizer.name == "adamw" ? 2 : 1;
  const int64_t bytes = parameters * ((mixed ? 2 : wide) + wide + states * wide + (mixed ? 4 : 0));
  std::string text;
  auto line = [&](const char* name, const std::string& value) { text += fmt::format("{:<16} {}\n", name, value); };
  line("model", fmt::format("{} ({}): {} layers, hidden {}, {} heads ({} of keys), ffn {}, vocabulary {}",
                            job.spec.name, job.spec.family, c.model.layers, c.model.hidden, c.model.heads,
                            c.model.kv_heads, c.model.ffn, c.model.vocab));
  line("parameters", fmt::format("{}", parameters));
  line("state per rank", fmt::format("{:.1f} MiB: weights, gradients, optimizer ({}); activations come on top",
                                     static_cast<double>(bytes) / (1 << 20), c.train.dtype));
  line("data", fmt::format("{} tokens, {} samples of {}{}", job.train.file().count(), job.train.size(), c.data.seq,
                           job.val ? fmt::format("; validation {} samples", job.val->size()) : "; no validation"));
  line("step", fmt::format("{} tokens = {} samples = {} ranks x {} samples in {} forward passes of at most {}",
                           job.tokens_per_step(), c.train.global_batch, a.dp, a.per_rank, a.steps, a.micro_batch));
  const double epochs = static_cast<double>(c.train.steps) * static_cast<double>(c.train.global_batch) /
                        static_cast<double>(job.train.size());
  line("run",
       fmt::format("{} steps, {} tokens, {:.2f} epochs", c.train.steps, c.train.steps * job.tokens_per_step(), epochs));
  return text;
}

}  // namespace weft::train
