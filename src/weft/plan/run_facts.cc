#include "weft/plan/run_facts.h"

#include <algorithm>
#include <cctype>
#include <regex>

#include "weft/cost/memory.h"
#include "weft/plan/runs.h"

namespace weft::plan {
namespace {

bool has(const std::string& text, const char* word) { return text.find(word) != std::string::npos; }

/// First year in which training stacks overlapped data- and pipeline-parallel communication by default and used flash kernels.
constexpr double kModernYear = 2023;
/// First year in which Megatron-LM ran the backward's tensor-parallel reduction beside the weight gradient.
constexpr double kAsyncReduction = 2022;
/// First year in which PyTorch trainers compiled the loss together with the model.
constexpr double kCompiledLossYear = 2025;

/// NeMo, Megatron-Bridge and the benchmark recipes made of them.
bool is_nemo(const RunRow& row) {
  const std::string source = lower_case(row.text("source"));
  if (has(source, "automodel") || has(source, "maxtext") || has(source, "jax")) return false;
  for (const char* name : {"dgxc", "nvidia nemo", "nvidia-nemo", "_nemo", "megatron-bridge", "mlcommons training"})
    if (has(source, name)) return true;
  return false;
}

/// Release of NVIDIA's container that the notes name ("NeMo container 25.11" is 25.11), 0 when they name none.
double container_release(const std::string& notes) {
  static const std::string kName = "nemo container ";
  const size_t at = notes.find(kName);
  return at == std::string::npos ? 0 : std::atof(notes.c_str() + at + kName.size());
}

/// What follows "recompute modules:" up to the next semicolon.
std::string recomputed_modules(const std::string& notes) {
  static const std::string kName = "recompute modules:";
  const size_t at = notes.find(kName);
  return at == std::string::npos ? "" : notes.substr(at + kName.size(), notes.find(';', at) - at - kName.size());
}

machine::Software::Scaling scaling_of(const RunRow& row, const std::string& notes) {
  using Scaling = machine::Software::Scaling;
  if (has(notes, "rowwise")) return Scaling::rows;
  if (has(notes, "mxfp8") || has(notes, "fp8-mx") || has(notes, "fp8_mx") || has(notes, "nvfp4") || lower_case(row.text("precision")) == "fp4") return Scaling::block;
  // Megatron-Bridge's "FP8" is "FP8-CS" of its first releases: current scaling. A compiler finds torchao's scale in the kernel
  // before, which costs no pass, like delayed scaling.
  return container_release(notes) > 0 || has(notes, "fp8-cs") || has(notes, "fp8_cs") ? Scaling::current : Scaling::delayed;
}

}  // namespace

std::string lower_case(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

bool is_gpt(const RunRow& row) {
  const std::string family = lower_case(row.text("model"));
  if (has(family, "oss")) return false;
  for (const char* name : {"gpt", "bloom", "opt", "mpt", "mt-nlg", "pythia", "neox", "falcon"})
    if (has(family, name)) return true;
  for (const char* name : {"llama", "qwen", "mistral", "mixtral", "deepseek", "nemotron", "gemma", "internlm", "kimi", "olmo"})
    if (has(family, name)) return false;
  return row.integer("ffn_hidden") == 4 * row.integer("hidden");
}

machine::Machine machine_of_run(const RunRow& row) {
  machine::Machine machine = machine::Machine::of(row.text("gpu"));
  const int64_t node = row.integer("node_gpus", machine.node_devices);
  if (node != machine.node_devices && machine.link_domain <= machine.node_devices) machine.link_domain = node;
  machine.node_devices = node;
  const std::string net = row.text("interconnect");
  std::smatch match;
  static const std::regex kManyPerNode(R"((\d+)x(\d+) ?Gb/s[^,;]*per node)"), kPerNode(R"((\d+) ?Gb/s[^,;]*per node)"), kPerDevice(R"((\d+) ?Gb/s[^,;]*per GPU)");
  // Only statements about the compute network count: a rate per node or per device.
  if (std::regex_search(net, match, kManyPerNode)) machine.nic_gbits = std::stod(match[1]) * std::stod(match[2]) / static_cast<double>(node);
  else if (std::regex_search(net, match, kPerNode)) machine.nic_gbits = std::stod(match[1]) / static_cast<double>(node);
  else if (std::regex_search(net, match, kPerDevice)) machine.nic_gbits = std::stod(match[1]);
  machine.host_network = has(lower_case(net), "omni-path");
  return machine;
}

machine::Software software_of_run(const RunRow& row, const machine::Machine& machine) {
  using machine::Software;
  Software software;
  const std::string notes = lower_case(row.text("notes")), strategy = lower_case(row.text("zero_stage_or_fsdp")), attention = lower_case(row.text("flash_attention"));
  const std::string precision = lower_case(row.text("precision"));
  const bool modern = row.number("year", kModernYear) >= kModernYear && attention != "no";
  const bool fsdp = has(strategy, "fsdp") || has(strategy, "hsdp") || has(strategy, "zero-3");
  // Transformer Engine and PyTorch choose a flash kernel by themselves; Megatron-LM before Hopper has to be asked for one.
  const bool flash = modern && (!attention.empty() || fsdp || machine.device.generation != 8 || !is_gpt(row));
  software.attention = flash ? Software::Attention::flash : Software::Attention::unfused;
  if (precision == "fp16") software.gradients = Software::Gradients::mixed;
  // NeMo's and Megatron-Bridge's recipes accumulate and reduce gradients in bf16.
  if (is_nemo(row)) software.gradients = Software::Gradients::half;
  // What FSDP reduces in: fp32 unless its mixed-precision policy names the training type (fms-fsdp's, Composer's PURE).
  if (fsdp && (has(lower_case(row.text("source")), "fms-fsdp") || has(notes, "mode pure"))) software.gradients = Software::Gradients::half;
  // PyTorch stacks (FSDP, DeepSpeed's ZeRO) run eager kernels unless a compiler or fused layers are named; Megatron and JAX
  // stacks are fused.
  const bool zero1 = has(strategy, "zero-1") && !has(strategy, "distributed optimizer");
  const bool named_fusion = is_nemo(row) || has(notes, "compile") || has(notes, "kernels te") || has(strategy, "maxtext") || has(notes, "maxtext") || has(strategy, "megatron");
  software.kernels = has(notes, "eager") || ((fsdp || zero1) && modern && !named_fusion) ? Software::Kernels::eager : Software::Kernels::fused;
  // Triton kernels and FlashAttention-2 were written for Ampere: on Hopper they are a generation behind.
  // So are the scans of state-space layers.
  const bool hybrid = row.text("kind") == "hybrid" || has(lower_case(row.text("model")), "nemotron-3");
  software.matched_attention = !hybrid && !(machine.device.generation == 9 && (has(attention, "triton") || has(attention, "sdpa")));
  software.dropout = !flash;
  software.overlap_dp = modern;
  software.overlap_pp = modern;
  software.whole_sends = !modern && has(strategy, "zero");  // ZeRO with a pipeline of that time is DeepSpeed's
  if (zero1) {
    // ZeRO-1 by that name is DeepSpeed's or its descendants': gradients travel in the training precision, and the gather
    // follows the optimizer step.
    software.overlap_gather = false;
    software.gradients = modern ? Software::Gradients::half : Software::Gradients::mixed;
  }
  // Split and overlapped products are Transformer Engine's, from Hopper on; Megatron-LM's own layers and DeepSpeed's wait.
  software.overlap_tp = modern && !fsdp && !zero1 && machine.device.generation >= 9;
  // Megatron-LM has had it since 2022; older ones, DeepSpeed's forks and PyTorch's DTensor wait for the reduction.
  software.overlap_tp_backward = !fsdp && !has(strategy, "zero") && row.number("year", kModernYear) >= kAsyncReduction;
  if (has(notes, "no tp-comm")) software.overlap_tp = false, software.overlap_pp = false;
  if (has(notes, "async tp") || has(notes, "asynctp")) software.overlap_tp = true;
  const bool compiled = has(notes, "compile");
  software.static_allocation = modern && software.kernels == Software::Kernels::fused;
  const bool foundry = has(lower_case(row.text("source")), "llm-foundry");  // fused cross entropy is its default
  if (has(notes, "fused cross entropy") || foundry || ((precision == "fp8" || precision == "fp4") && (!fsdp || is_nemo(row)))) software.loss = Software::Loss::in_place;
  else if (compiled && row.number("year", kModernYear) >= kCompiledLossYear) software.loss = Software::Loss::compiled;
  else if (fsdp && row.integer("tp", 1) > 1) software.loss = Software::Loss::split;
  software.low_precision_saved = !fsdp || is_nemo(row);  // Transformer Engine saves fp8 inputs; torch casts again in the backward
  software.python_checkpoint = lower_case(row.text("recompute")) == "full" && !fsdp;
  software.sharded_copies = !is_nemo(row);  // Megatron's FSDP computes with views of the buffers that it communicates
  software.frozen_base = row.text("kind") == "lora";
  software.scaling = scaling_of(row, notes);
  // From this release on the recipes for Blackwell capture whole iterations, expert layers included.
  constexpr double kWholeGraphs = 26.06;
  software.graphs = machine.device.generation >= 10 && container_release(notes) >= kWholeGraphs;
  // Before, expert models on Grace hosts had attention, router and dispatch preparation captured (Megatron-Bridge 0.2 to 0.5,
  // scripts/performance, cuda_graph_scope of GB200 and GB300).
  software.captured_blocks = row.integer("experts") > 1 && container_release(notes) > 0 && machine.device.name.starts_with("GB");
  // Set throughout BLOOM's runs, against hanging (bigscience, train/tr11-176B-ml).
  software.blocking_launches = has(lower_case(row.text("source")), "bigscience") || has(notes, "launch_blocking");
  software.overlap_ep = has(notes, "all-to-all overlap");
  const std::string modules = recomputed_modules(notes);
  software.recompute_norms = has(modules, "norm");
  software.recompute_activation = has(modules, "norm, act") || has(modules, "moe_act");
  software.recompute_mlp = has(modules, "mlp");
  return software;
}

void fill_strategy(const RunRow& row, const machine::Software& software, layout::Layout& layout, std::vector<std::string>& assumptions) {
  const std::string strategy = lower_case(row.text("zero_stage_or_fsdp"));
  const bool fsdp = has(strategy, "fsdp") || has(strategy, "hsdp");
  if (fsdp || has(strategy, "zero-3")) layout.zero = 3;
  else if (has(strategy, "zero-2") || has(strategy, "shard_grad_op")) layout.zero = 2;
  else if (has(strategy, "zero-1") || lower_case(row.text("distributed_optimizer")) == "yes") layout.zero = 1;
  else if ((strategy.empty() || strategy == "none") && software.overlap_dp) {  // "none" answers whether FSDP is used
    layout.zero = 1;
    assumptions.push_back("zero 1");
  }
  if (has(strategy, "shard_grad_op")) layout.zero = 2;
  static const std::regex kGroup(R"((?:groups of |fsdp2? |fsdp(?=\d\d|[3-9]))(\d+))");
  std::smatch match;
  if (has(strategy, "hsdp")) layout.shard_group = std::min<int64_t>(8, layout.dp * layout.cp);
  if (std::regex_search(strategy, match, kGroup)) {
    const int64_t group = std::stoll(match[1]);
    if (group >= 1 && group < layout.dp * layout.cp && (layout.dp * layout.cp) % group == 0) layout.shard_group = group;
  }
  const std::string recompute = lower_case(row.text("recompute"));
  if (recompute == "full") layout.recompute = layout::Recompute::full;
  if (recompute == "selective") layout.recompute = fsdp ? layout::Recompute::half : layout::Recompute::attention;
  const std::string sequence = lower_case(row.text("sequence_parallel"));
  layout.sequence_parallel = layout.tp > 1 && (sequence == "yes" || (sequence.empty() && software.overlap_dp));
  if (layout.tp > 1 && sequence.empty()) assumptions.push_back(layout.sequence_parallel ? "sequence parallel" : "no sequence parallel");
  const std::string notes = lower_case(row.text("notes"));
  if (has(notes, "1f1b-i") && row.text("vpp").empty()) layout.chunks = (row.integer("layers") + layout.pp - 1) / layout.pp;
  const bool states_schedule = has(notes, "schedule") || has(notes, "1f1b") || has(notes, "zb-") || !software.overlap_pp;
  const int64_t per_stage = row.integer("layers") / layout.pp;
  if (layout.pp > 1 && row.text("vpp").empty() && !states_schedule && row.integer("layers") % layout.pp == 0 && per_stage % 2 == 0) {
    // Two layers per chunk are the usual choice where nothing is said and sends overlap.
    layout.chunks = per_stage / 2;
    assumptions.push_back("interleaved, 2 layers per chunk");
  }
  if (has(notes, "zb-2p")) layout.schedule = "zb-h2";
  else if (has(notes, "zb-1p")) layout.schedule = "zb-h1";
}

double analytic_bytes(const Job& job) {
  const layout::Layout& layout = job.layout;
  const model::AttentionSpec& attention = job.model.kinds.front().block.attention;
  const double layers = static_cast<double>(job.model.kind_of_layer.size()), h = job.model.hidden, tp = static_cast<double>(layout.tp), pp = static_cast<double>(layout.pp);
  const double states = 18 * 12 * layers * h * h / (tp * pp);
  cost::ClassicForm form = cost::ClassicForm::tensor;
  if (layout.recompute == layout::Recompute::full) form = cost::ClassicForm::full;
  else if (layout.recompute == layout::Recompute::attention) form = cost::ClassicForm::selective;
  else if (layout.sequence_parallel) form = cost::ClassicForm::sequence;
  const double layer = cost::classic_layer_bytes(static_cast<double>(job.sequence), static_cast<double>(layout.micro_batch), h, static_cast<double>(attention.heads), tp, form);
  // The first stage holds layers of p micro-batches, with interleaving 1 + (p-1) / (p v) times as many.
  const double interleaving = layout.chunks > 1 ? 1 + (pp - 1) / (pp * static_cast<double>(layout.chunks)) : 1;
  return states + layers * layer * interleaving;
}

}  // namespace weft::plan
