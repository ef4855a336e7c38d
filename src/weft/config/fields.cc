#include "weft/config/fields.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

namespace weft::config {
namespace {

/// Limits that no real run meets. They keep products of sizes within 63 bits and make a slip of the keyboard an error
/// instead of an hour of allocation.
constexpr double kMostLayers = 1e4, kMostHeads = 1e5, kMostWidth = 1e7, kMostTokens = 1e9, kMostBatch = 1e9, kMostSteps = 1e9;
constexpr double kMostThreads = 1024, kMostGigabytes = 1e6;
constexpr double kMostLossScale = 1e30;  // far from fp32's largest number
/// Of numbers that set the size of a step: beyond these no published run goes, and none would learn.
constexpr double kMostInitStd = 1, kMostLearningRate = 100, kMostEpsilon = 1, kMostDecay = 10, kMostNorm = 1e6, kMostTheta = 1e12;
constexpr double kMostBucketMb = 1e6, kMostTimeout = 1e7;

Rule any() {
  return {};
}
Rule at_least(double low) {
  return {.low = low};
}
Rule above(double low, double high) {
  return {.low = low, .high = high, .low_allowed = false};
}
Rule between(double low, double high) {
  return {.low = low, .high = high};
}
Rule one_of(std::vector<std::string> choices) {
  return {.choices = std::move(choices)};
}

// clang-format off
std::vector<Field> make_fields() {
  using C = RunConfig;
  return {
    {"model.preset", "a model by name, for instance gpt2 or llama3-8b; \"\" = the sizes below. With a preset, sizes that are not 0 replace its own", any(), [](C& c) { return &c.model.preset; }},
    {"model.family", "without a preset: llama (RMSNorm, rotary positions, SwiGLU) or gpt2 (LayerNorm, learned positions, GELU, biases)", one_of({"llama", "gpt2"}), [](C& c) { return &c.model.family; }},
    {"model.layers", "transformer blocks; 0 = the preset's", between(0, kMostLayers), [](C& c) { return &c.model.layers; }},
    {"model.hidden", "width of the residual stream; 0 = the preset's", between(0, kMostWidth), [](C& c) { return &c.model.hidden; }},
    {"model.heads", "attention heads; 0 = the preset's", between(0, kMostHeads), [](C& c) { return &c.model.heads; }},
    {"model.kv_heads", "heads of keys and values; 0 = the preset's, or as many as heads", between(0, kMostHeads), [](C& c) { return &c.model.kv_heads; }},
    {"model.head_dim", "width of a head; 0 = the preset's, or hidden / heads", between(0, kMostWidth), [](C& c) { return &c.model.head_dim; }},
    {"model.ffn", "inner width of the MLP; 0 = the preset's, or 4 hidden (gpt2), or 8/3 hidden rounded up to a multiple of 32 (llama)", between(0, kMostWidth), [](C& c) { return &c.model.ffn; }},
    {"model.vocab", "size of the vocabulary; 0 = the training data's. A preset's is used only when the data does not say one", between(0, kMostTokens), [](C& c) { return &c.model.vocab; }},
    {"model.context", "longest sequence the model can take; 0 = the preset's, or data.seq", between(0, kMostTokens), [](C& c) { return &c.model.context; }},
    {"model.tied_head", "whether the output projection is the embedding: yes, no, or auto = the preset's, or the family's habit (gpt2 yes, llama no)", one_of({"auto", "yes", "no"}), [](C& c) { return &c.model.tied_head; }},
    {"model.rope_theta", "base of the rotary angles; 0 = the preset's, or 10000", between(0, kMostTheta), [](C& c) { return &c.model.rope_theta; }},
    {"model.init_std", "standard deviation of the initial weights (output projections of blocks: divided by sqrt(2 layers)); 0 = the preset's, or 0.02", between(0, kMostInitStd), [](C& c) { return &c.model.init_std; }},
    {"model.dropout", "share of activations zeroed in training; the mask is a function of train.seed, step and place, whatever the layout", between(0, 0.99), [](C& c) { return &c.model.dropout; }},

    {"data.train", "token file to train on, made by `weft data prepare` (required)", any(), [](C& c) { return &c.data.train; }},
    {"data.val", "token file for the validation loss; \"\" = none", any(), [](C& c) { return &c.data.val; }},
    {"data.format", "weft, or raw-u16: bare little-endian 16-bit ids as nanoGPT writes them", one_of({"weft", "raw-u16"}), [](C& c) { return &c.data.format; }},
    {"data.seq", "tokens per sample. Samples are consecutive windows: every token is a target once per epoch", between(1, kMostTokens), [](C& c) { return &c.data.seq; }},
    {"data.shuffle", "order of samples: a new permutation each epoch, from train.seed; false = file order", any(), [](C& c) { return &c.data.shuffle; }},

    {"train.steps", "optimizer updates", between(1, kMostSteps), [](C& c) { return &c.train.steps; }},
    {"train.global_batch", "samples per update over all ranks; what each rank accumulates follows from it", between(1, kMostBatch), [](C& c) { return &c.train.global_batch; }},
    {"train.micro_batch", "most samples in one forward pass of a rank; 0 = the rank's whole share of the global batch", between(0, kMostBatch), [](C& c) { return &c.train.micro_batch; }},
    {"train.seed", "fixes initial weights and data order, whatever the number of ranks", at_least(0), [](C& c) { return &c.train.seed; }},
    {"train.dtype", "fp64, fp32, bf16 or fp16: weights and activations; bf16 and fp16 keep master weights and optimizer state in fp32, fp16 scales the loss", one_of({"fp64", "fp32", "bf16", "fp16"}), [](C& c) { return &c.train.dtype; }},
    {"train.gradient_dtype", "in which gradients are kept and summed over micro-batches: fp32, bf16, or auto = fp64 for fp64, else fp32", one_of({"auto", "fp32", "bf16"}), [](C& c) { return &c.train.gradient_dtype; }},
    {"train.reduce_dtype", "in which gradients travel between ranks: bf16 halves the bytes of fp32; auto = as they are kept. Sums form in fp32", one_of({"auto", "fp32", "bf16"}), [](C& c) { return &c.train.reduce_dtype; }},
    {"train.loss_scale", "fp16: factor of the loss at the start; halved when gradients overflow", between(1, kMostLossScale), [](C& c) { return &c.train.loss_scale; }},
    {"train.loss_scale_interval", "fp16: steps without overflow after which the factor doubles", between(1, kMostSteps), [](C& c) { return &c.train.loss_scale_interval; }},
    {"train.eval_every", "steps between validations; 0 = only after the last step", between(0, kMostSteps), [](C& c) { return &c.train.eval_every; }},
    {"train.eval_samples", "validation samples used during training, spread evenly over the file; 0 = all. The last validation uses all", at_least(0), [](C& c) { return &c.train.eval_samples; }},
    {"train.threads", "threads per rank for tensor kernels; 0 = the machine's cores / ranks on it, fewer for models too small to share", between(0, kMostThreads), [](C& c) { return &c.train.threads; }},
    {"train.recompute", "what of the blocks' activations is computed again in backward instead of kept, for less memory and the same result: none; attention = its scores, where they are kept at all; keep_matmuls = all but attention and matrix products; half = all but attention and every second product; keep_attention = all but attention; full = all but each block's input", one_of({"none", "attention", "keep_matmuls", "half", "keep_attention", "full"}), [](C& c) { return &c.train.recompute; }},
    {"train.recompute_every", "recompute the first and every so many-th block after it only", between(1, kMostLayers), [](C& c) { return &c.train.recompute_every; }},
    {"train.offload_activations", "keep the blocks' activations in host memory from forward to backward; on the CPU they are there already", any(), [](C& c) { return &c.train.offload_activations; }},
    {"train.memory_limit_gb", "GiB that tensors of a rank may hold; a run that needs more ends with a table of what holds it. 0 = what the machine has", between(0, kMostGigabytes), [](C& c) { return &c.train.memory_limit_gb; }},
    {"train.ema", "decay of a running average of the weights, updated with every step: validation measures it beside the weights, and the run ends with model_ema.safetensors; 0 = none, usual are 0.99 to 0.9999", between(0, 0.9999999), [](C& c) { return &c.train.ema; }},
    {"train.ema_warmup", "the decay starts low, (1 + k) / (10 + k) at update k, so that the average soon forgets the start values", any(), [](C& c) { return &c.train.ema_warmup; }},

    {"optimizer.name", "adamw, adam8bit (moments in 8 bits), lion, adafactor (second moments by rows and columns), muon (momentum of matrices, orthogonalised; adamw for the rest) or sgd", one_of({"adamw", "adam8bit", "lion", "adafactor", "muon", "sgd"}), [](C& c) { return &c.optimizer.name; }},
    {"optimizer.lr", "peak learning rate; but for sgd at most 1. adafactor: as a share of each parameter's root mean square", above(0, kMostLearningRate), [](C& c) { return &c.optimizer.lr; }},
    {"optimizer.beta1", "adamw, adam8bit, lion, muon: decay of the first moment", between(0, 0.9999999), [](C& c) { return &c.optimizer.beta1; }},
    {"optimizer.beta2", "adamw, adam8bit, muon: decay of the second moment; lion: of the moment (0.99 is usual there)", between(0, 0.9999999), [](C& c) { return &c.optimizer.beta2; }},
    {"optimizer.eps", "adamw, adam8bit, muon: added to the root of the second moment", above(0, kMostEpsilon), [](C& c) { return &c.optimizer.eps; }},
    {"optimizer.moments_dtype", "adamw: in which moments are kept: auto = fp32 (fp64 for fp64), or bf16, for betas up to 0.992", one_of({"auto", "bf16"}), [](C& c) { return &c.optimizer.moments_dtype; }},
    {"optimizer.momentum", "sgd and muon: momentum; -1 = 0.9 for sgd, 0.95 for muon", between(-1, 0.9999999), [](C& c) { return &c.optimizer.momentum; }},
    {"optimizer.adamw_for", "muon: names of the matrices that get adamw instead, with * for any characters and | between names; what is no matrix gets it anyway", any(), [](C& c) { return &c.optimizer.adamw_for; }},
    {"optimizer.rates", "learning rates of some parameters as a share of optimizer.lr: \"head.*=0.5; *.attn.*|*.norm*.*=0.1\"; the first rule that names a parameter counts, the others have 1", any(), [](C& c) { return &c.optimizer.rates; }},
    {"optimizer.weight_decay", "of matrices and embeddings; norms and biases have none", between(0, kMostDecay), [](C& c) { return &c.optimizer.weight_decay; }},
    {"optimizer.clip_norm", "largest global gradient norm; 0 = no clipping, else at least 1e-6", between(0, kMostNorm), [](C& c) { return &c.optimizer.clip_norm; }},

    {"schedule.name", "learning rate after the warm-up: cosine, linear, constant, wsd (constant, then linear over schedule.decay steps) or inverse_sqrt", one_of({"cosine", "linear", "constant", "wsd", "inverse_sqrt"}), [](C& c) { return &c.schedule.name; }},
    {"schedule.warmup",
       "steps over which the learning rate rises linearly to its peak; -1 = a tenth of train.steps, at most 100",
       at_least(-1), [](C& c) { return &c.schedule.warmup; }},
    {"schedule.decay", "wsd: steps over which the learning rate falls at the end; -1 = a tenth of train.steps", at_least(-1), [](C& c) { return &c.schedule.decay; }},
    {"schedule.final_ratio", "learning rate at the last step as a share of the peak", between(0, 1), [](C& c) { return &c.schedule.final_ratio; }},

    {"layout.dp", "data-parallel ranks; 0 = all ranks / (tp x pp)", between(0, kMostSteps), [](C& c) { return &c.layout.dp; }},
    {"layout.tp", "tensor-parallel ranks: neighbours that share every layer out, heads, inner MLP columns and vocabulary, and read the same samples (docs/tensor.md)", between(1, kMostThreads), [](C& c) { return &c.layout.tp; }},
    {"layout.pp", "pipeline ranks: each has a stretch of the layers, and micro-batches pass through (docs/pipeline.md); micro-batches are those of train.micro_batch", between(1, kMostThreads), [](C& c) { return &c.layout.pp; }},
    {"layout.backend", "what carries communication: auto, local (shared memory of one machine) or gloo (TCP)", one_of({"auto", "local", "gloo"}), [](C& c) { return &c.layout.backend; }},
    {"layout.bucket_mb", "MiB of gradients that are reduced together during backward", above(0, kMostBucketMb), [](C& c) { return &c.layout.bucket_mb; }},
    {"layout.last_bucket_mb", "the same for the bucket that is ready last, which nothing hides", above(0, kMostBucketMb), [](C& c) { return &c.layout.last_bucket_mb; }},
    {"layout.timeout_s", "seconds without a sign of life from a peer after which a call fails", between(1, kMostTimeout), [](C& c) { return &c.layout.timeout_s; }},

    {"parallel.zero", "what the data-parallel ranks share out: 0 = nothing (DDP), 1 = the optimizer's state, 2 = gradients too, 3 = parameters too (FSDP). Same losses, less memory", between(0, 3), [](C& c) { return &c.parallel.zero; }},
    {"parallel.dp_shard", "zero >= 1: neighbouring ranks that share one copy of what is shared out; the other ranks hold further copies (HSDP). Divides the number of ranks; 0 = all ranks", between(0, kMostSteps), [](C& c) { return &c.parallel.dp_shard; }},
    {"parallel.reshard_after_forward", "zero = 3: release a block's parameters after its forward and gather them again in backward; false = keep them until their gradients have landed", any(), [](C& c) { return &c.parallel.reshard_after_forward; }},
    {"parallel.reshard_group", "zero = 3: neighbouring ranks that hold one copy of a block between them from its forward to its backward, which gathers among them (FSDP2's integer reshard_after_forward); divides the ranks that share parameters out; 0 = none", between(0, kMostSteps), [](C& c) { return &c.parallel.reshard_group; }},
    {"parallel.prefetch", "zero = 3: blocks gathered ahead of the one that runs", between(0, 8), [](C& c) { return &c.parallel.prefetch; }},
    {"parallel.sequence_parallel", "layout.tp > 1: between the layers each tensor-parallel rank holds its part of the sequence, so that norms, dropout and their memory are shared out too; data.seq divides by layout.tp", any(), [](C& c) { return &c.parallel.sequence_parallel; }},
    {"parallel.tp_overlap", "layout.tp > 1: pieces in which activations travel between tensor-parallel ranks, each beside the product of its neighbour (Megatron-LM's tp_comm_overlap); 1 = no overlap. Same losses", between(1, 64), [](C& c) { return &c.parallel.tp_overlap; }},
    {"parallel.schedule", "layout.pp > 1: who does what when. gpipe, 1f1b, interleaved (less bubble, more messages), zb-h1 (weight gradients fill the bubble), zb-v or dualpipe-v", one_of({"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"}), [](C& c) { return &c.parallel.schedule; }},
    {"parallel.chunks", "layout.pp > 1: stretches of layers per rank; 0 = the schedule's own number", between(0, kMostThreads), [](C& c) { return &c.parallel.chunks; }},

    {"offload.optimizer", "where the optimizer's state and masters are between the steps: none = with the weights; cpu = in host memory, where the step is made, too (on a CPU the same place); nvme = in a file per rank in offload.dir, streamed through buffers around the update. Same losses", one_of({"none", "cpu", "nvme"}), [](C& c) { return &c.offload.optimizer; }},
    {"offload.parameters", "parallel.zero = 3: where a rank's part of the blocks' parameters is between uses: none = with the computation; cpu = in host memory, with its gradients, from where each gather copies it (on a CPU the same place). Same losses. nvme is refused: peers read these parts in place, twice a step", one_of({"none", "cpu", "nvme"}), [](C& c) { return &c.offload.parameters; }},
    {"offload.dir", "nvme: folder on a local disk. The files have no names; they are gone with the process, however it ends", any(), [](C& c) { return &c.offload.dir; }},
    {"offload.buffer_mb", "nvme: MiB of state that is read, updated and written at a time", between(0.01, 1e5), [](C& c) { return &c.offload.buffer_mb; }},
    {"offload.buffers", "nvme: buffers of a rank: one is updated, one is written, the others are read ahead", between(3, 64), [](C& c) { return &c.offload.buffers; }},

    {"run.dir", "folder for config.toml, metrics.jsonl and model.safetensors", any(), [](C& c) { return &c.run.dir; }},
    {"run.overwrite", "replace an earlier run in that folder", any(), [](C& c) { return &c.run.overwrite; }},
  };
}
// clang-format on

std::string range_text(const Rule& rule) {
  const std::string low = fmt::format("{} {}", rule.low_allowed ? "at least" : "more than", rule.low);
  return rule.high < 1e300 ? fmt::format("{}, at most {}", low, rule.high) : low;
}

}  // namespace

std::string Rule::broken_by(const Slot& slot) const {
  if (auto* text = std::get_if<std::string*>(&slot)) {
    if (choices.empty() || std::find(choices.begin(), choices.end(), **text) != choices.end()) return {};
    return fmt::format("\"{}\" is none of {}", **text, fmt::join(choices, ", "));
  }
  double value = 0;
  if (auto* whole = std::get_if<int64_t*>(&slot)) value = static_cast<double>(**whole);
  if (auto* real = std::get_if<double*>(&slot)) value = **real;
  const bool inside = std::isfinite(value) && value <= high && (low_allowed ? value >= low : value > low);
  return inside ? std::string() : fmt::format("{} is out of range ({})", value, range_text(*this));
}

const std::vector<Field>& fields() {
  static const std::vector<Field> table = make_fields();
  return table;
}

const Field* find_field(const std::string& key) {
  const auto found =
      std::find_if(fields().begin(), fields().end(), [&](const Field& field) { return field.key == key; });
  return found == fields().end() ? nullptr : &*found;
}

std::string type_name(const Slot& slot) {
  static const char* const names[] = {"true or false", "whole number", "number", "text"};
  return names[slot.index()];
}

}  // namespace weft::config
