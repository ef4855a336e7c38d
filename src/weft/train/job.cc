#include "weft/train/job.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "weft/comm/mesh.h"
#include "weft/core/error.h"
#include "weft/layout/part.h"
#include "weft/train/optimizer.h"
#include "weft/train/stages.h"

namespace weft::train {
namespace {

data::TokenFile open_data(const config::RunConfig& config, const std::string& path) {
  return data::TokenFile::open(path, data::token_format(config.data.format), config.model.vocab);
}

/// Files up to this size are read through before the run starts (a tenth of a second): a damaged file is then found before
/// anything is trained or replaced. In larger ones a bad id is found when it is reached; `weft data inspect --check` reads all.
constexpr int64_t kReadThroughBytes = 256 << 20;

void read_through(const data::TokenFile& file) {
  if (file.count() * file.info().width <= kReadThroughBytes) file.check();
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
  read_through(val);
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
  config.schedule.decay = config::decay_steps(config);
  config.optimizer.momentum = config::momentum(config.optimizer);
  config.layout.dp = accumulation.dp;
  config.parallel.chunks = config.layout.pp > 1 ? config::pipeline_chunks(config) : 0;
  config.train.micro_batch = accumulation.micro_batch;
  return config;
}

}  // namespace

at::ScalarType scalar_type(const std::string& name) {
  if (name == "fp64") return at::kDouble;
  if (name == "bf16") return at::kBFloat16;
  if (name == "fp16") return at::kHalf;
  return at::kFloat;
}

at::ScalarType gradient_type(const Job& job) {
  if (job.config.train.gradient_dtype != "auto") return scalar_type(job.config.train.gradient_dtype);
  return job.dtype == at::kDouble ? at::kDouble : at::kFloat;
}

Job make_job(const config::RunConfig& config, int64_t ranks) {
  Findings findings;
  config::check(config, findings);
  const config::Accumulation accumulation = config::accumulation(config, ranks, findings);
  findings.throw_if_any("configuration");

  const data::TokenFile train = open_data(config, config.data.train);
  const model::ModelSpec spec = config::model_spec(config, train.info().vocab);
  read_through(train);
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

Axes make_axes(const Job& job, const World& world) {
  const auto& layout = job.config.layout;
  if (layout.tp == 1 && layout.pp == 1) return {.world = world.comm(), .dp = world.comm(), .pp = {}, .tp = {}, .text = {}};
  const Mesh mesh(world, {{"pp", layout.pp}, {"dp", layout.dp}, {"tp", layout.tp}});
  return {.world = world.comm(),
          .dp = mesh["dp"],
          .pp = mesh["pp"],
          .tp = nn::TensorAxis(mesh["tp"], job.config.parallel.sequence_parallel, job.config.parallel.tp_overlap),
          .text = mesh.describe()};
}

data::TrainBatches train_batches(const Job& job, const Comm& comm) {
  const data::Sampler sampler(job.train.size(), static_cast<uint64_t>(job.config.train.seed), job.config.data.shuffle);
  return {job.train, sampler, job.config.train.global_batch, job.accumulation.micro_batch, comm.rank(), comm.size()};
}

WorldOptions world_options(const config::RunConfig& config) {
  WorldOptions options;
  if (config.layout.backend == "local") options.backend = BackendKind::local;
  if (config.layout.backend == "gloo") options.backend = BackendKind::gloo;
  options.timeout = std::chrono::seconds(config.layout.timeout_s);
  return options;
}

int rank_threads(const Job& job, int64_t cores, int64_t local_ranks) {
  if (job.config.train.threads > 0) return static_cast<int>(job.config.train.threads);
  // A thread is worth waking for half a millisecond of work: 5e7 operations at the 100 GFLOP/s of a core.
  constexpr double kWorkPerThread = 5e7;
  const double tokens = static_cast<double>(job.accumulation.micro_batch * job.config.data.seq);
  const int64_t widest = std::max(job.spec.hidden, job.config.model.ffn);
  const double product = 2.0 * tokens * static_cast<double>(job.spec.hidden) * static_cast<double>(widest);
  const double share = static_cast<double>(std::max<int64_t>(1, cores / local_ranks));
  return static_cast<int>(std::clamp(product / kWorkPerThread, 1.0, share));
}

namespace {

/// Of the part that the first of the tensor-parallel ranks holds.
std::vector<int64_t> local_shape(const model::Param& param, const Job& job) {
  const layout::ParamPart part = layout::param_part(param, job.spec, job.config.layout.tp, 0);
  std::vector<int64_t> shape = param.shape;
  if (part.dim >= 0) shape[static_cast<size_t>(part.dim)] = part.part.size;
  return shape;
}

/// Of the first pipeline rank.
std::vector<model::Param> local_table(const Job& job) {
  std::vector<model::Param> table = model::parameter_table(job.spec);
  if (job.config.layout.pp == 1) return table;
  const std::vector<models::StagePart> parts = stage_plan(job).of_rank(0);
  std::erase_if(table, [&](const model::Param& p) { return !models::holds(parts, p, job.spec.tied_head); });
  return table;
}

int64_t local_parameters(const Job& job) {
  int64_t total = 0;
  for (const model::Param& param : local_table(job)) {
    int64_t numel = 1;
    for (const int64_t size : local_shape(param, job)) numel *= size;
    total += numel;
  }
  return total;
}

/// Stored on one rank: weights, gradients, the optimizer's moments, averaged weights; of 16-bit weights also fp32 masters.
/// parallel.zero shares them out over the ranks of a replica, from the last to the first; but for the rows and columns of adafactor.
/// Of optimizer state in files, the buffers.
int64_t state_bytes(const Job& job) {
  const auto weight = static_cast<int64_t>(c10::elementSize(job.dtype));
  const auto gradient = static_cast<int64_t>(c10::elementSize(gradient_type(job)));
  const int64_t wide = std::max<int64_t>(weight, 4);
  const auto& parallel = job.config.parallel;
  const int64_t shards = parallel.dp_shard > 0 ? parallel.dp_shard : job.accumulation.dp;
  const auto share = [&](int64_t zero, double bytes) { return bytes / static_cast<double>(parallel.zero >= zero ? shards : 1); };
  const auto parameters = static_cast<double>(local_parameters(job));
  double moments = 0, whole = 0;
  for (const model::Param& p : local_table(job)) {
    const bool factors = job.config.optimizer.name == "adafactor" && p.shape.size() >= 2;
    (factors ? whole : moments) += moment_bytes(job.config.optimizer, p.name, factors ? p.shape : local_shape(p, job), static_cast<double>(wide));
  }
  const auto masters = static_cast<double>(weight < wide ? wide : 0);
  const double averages = share(1, job.config.train.ema > 0 ? parameters * static_cast<double>(wide) : 0);
  double optimizer = share(1, moments + parameters * masters) + whole;
  const config::OffloadConfig& offload = job.config.offload;
  constexpr double kMiB = 1 << 20;
  if (offload.optimizer == "nvme") optimizer = std::min(optimizer, offload.buffer_mb * kMiB * static_cast<double>(offload.buffers));
  return static_cast<int64_t>(share(3, parameters * static_cast<double>(weight)) + share(2, parameters * static_cast<double>(gradient)) +
                              optimizer + averages);
}

double epochs(const Job& job) {
  const auto& c = job.config.train;
  return static_cast<double>(c.steps) * static_cast<double>(c.global_batch) / static_cast<double>(job.train.size());
}

}  // namespace

std::string describe_json(const Job& job) {
  const auto& c = job.config;
  const auto& a = job.accumulation;
  return nlohmann::ordered_json{{"model", job.spec.name},
                                {"parameters", model::parameter_count(job.spec)},
                                {"state_bytes_per_rank", state_bytes(job)},
                                {"train_tokens", job.train.file().count()},
                                {"train_samples", job.train.size()},
                                {"val_samples", job.val ? job.val->size() : 0},
                                {"tokens_per_step", job.tokens_per_step()},
                                {"ranks", a.dp * c.layout.tp * c.layout.pp},
                                {"pipeline_ranks", c.layout.pp},
                                {"tensor_parallel_ranks", c.layout.tp},
                                {"samples_per_rank", a.per_rank},
                                {"micro_batch", a.micro_batch},
                                {"accumulation_steps", a.steps},
                                {"steps", c.train.steps},
                                {"epochs", epochs(job)}}
      .dump(2);
}

std::string describe(const Job& job) {
  const auto& c = job.config;
  const auto& a = job.accumulation;
  const int64_t parameters = model::parameter_count(job.spec);
  std::string text;
  auto line = [&](const char* name, const std::string& value) { text += fmt::format("{:<16} {}\n", name, value); };
  line("model", fmt::format("{} ({}): {} layers, hidden {}, {} heads ({} of keys), ffn {}, vocabulary {}",
                            job.spec.name, job.spec.family, c.model.layers, c.model.hidden, c.model.heads,
                            c.model.kv_heads, c.model.ffn, c.model.vocab));
  line("parameters", fmt::format("{}", parameters));
  line("state per rank", fmt::format("{:.1f} MiB: weights, gradients, optimizer ({}); activations come on top",
                                     static_cast<double>(state_bytes(job)) / (1 << 20), c.train.dtype));
  line("data", fmt::format("{} tokens, {} samples of {}{}", job.train.file().count(), job.train.size(), c.data.seq,
                           job.val ? fmt::format("; validation {} samples", job.val->size()) : "; no validation"));
  if (c.layout.tp > 1 || c.layout.pp > 1) {
    line("layout", fmt::format("{}{} data-parallel x {} tensor-parallel ranks{}", c.layout.pp > 1 ? fmt::format("{} pipeline x ", c.layout.pp) : "", a.dp, c.layout.tp,
                               c.parallel.sequence_parallel ? ", sequence parallel" : ""));
  }
  if (c.layout.pp > 1) {
    const StagePlan plan = stage_plan(job);
    const schedule::Schedule schedule = plan.maker({static_cast<int>(c.layout.pp), static_cast<int>(a.steps), static_cast<int>(c.parallel.chunks)});
    line("pipeline", fmt::format("{} of {} micro-batches, bubble {:.1f}% with equal stages", schedule.name, a.steps, 100 * planned_bubble(schedule)));
    line("stages", to_text(plan));
  }
  line("step", fmt::format("{} tokens = {} samples = {} ranks x {} samples in {} forward passes of at most {}",
                           job.tokens_per_step(), c.train.global_batch, a.dp, a.per_rank, a.steps, a.micro_batch));
  line("run",
       fmt::format("{} steps, {} tokens, {:.2f} epochs", c.train.steps, c.train.steps * job.tokens_per_step(), epochs(job)));
  return text;
}

}  // namespace weft::train
