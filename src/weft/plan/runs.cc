#include "weft/plan/runs.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <numeric>
#include <ostream>
#include <regex>

#include "weft/core/error.h"
#include "weft/plan/run_facts.h"

namespace weft::plan {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;

/// Splits one CSV record; returns false at the end of the file. Quoted fields may contain line breaks.
bool read_record(std::istream& in, std::vector<std::string>& fields) {
  fields.clear();
  std::string field;
  bool quoted = false, any = false;
  for (int c = in.get(); c != EOF; c = in.get()) {
    any = true;
    if (quoted) {
      if (c != '"') field += static_cast<char>(c);
      else if (in.peek() == '"') field += static_cast<char>(in.get());
      else quoted = false;
    } else if (c == '"') {
      quoted = true;
    } else if (c == ',') {
      fields.push_back(std::move(field));
      field.clear();
    } else if (c == '\n') {
      break;
    } else if (c != '\r') {
      field += static_cast<char>(c);
    }
  }
  if (any) fields.push_back(std::move(field));
  return any;
}

constexpr const char* kRequired[] = {"layers", "hidden", "heads", "seq_len", "micro_batch", "global_batch_seqs", "gpus", "gpu", "tp", "pp"};

/// Gated MLPs of blank width: the Llama habit of 8/3 h, rounded to 256.
int64_t usual_ffn(int64_t hidden, bool gated) { return gated ? (hidden * 8 / 3 + 255) / 256 * 256 : 4 * hidden; }

model::BlockSpec block_of_run(const RunRow& row, bool gpt, std::vector<std::string>& assumptions) {
  model::BlockSpec block;
  const int64_t hidden = row.integer("hidden"), heads = row.integer("heads");
  block.attention.heads = heads;
  block.attention.kv_heads = row.integer("kv_heads", heads);
  block.attention.head_dim = row.integer("head_dim", hidden / heads);
  block.mlp.gated = !gpt;
  block.mlp.ffn = row.integer("ffn_hidden", 0);
  if (block.mlp.ffn == 0) {
    block.mlp.ffn = usual_ffn(hidden, block.mlp.gated);
    if (row.integer("experts") == 0) assumptions.push_back(fmt::format("ffn_hidden {}", block.mlp.ffn));
  }
  if (gpt) {
    block.attention.qkv_bias = block.attention.out_bias = block.mlp.bias = true;
    block.mlp.activation = model::Activation::gelu_tanh;
  }
  // Four times the hidden size without gating elsewhere in the GPT form; squared ReLU is not gated either.
  const std::string family = lower_case(row.text("model"));
  if (family.find("nemotron") != std::string::npos) block.mlp.gated = false;
  return block;
}

/// DeepSeek-V2/V3 and Kimi: sizes of the latent attention are the family's (arXiv 2412.19437, section 4.2).
model::LatentAttention deepseek_attention(int64_t hidden) {
  return {.q_lora_rank = hidden >= 5000 ? 1536 : 0, .kv_lora_rank = 512, .qk_nope_dim = 128, .qk_rope_dim = 64, .v_dim = 128};
}

void add_experts(const RunRow& row, model::ModelSpec& spec, std::vector<std::string>& assumptions) {
  const int64_t experts = row.integer("experts");
  if (experts <= 1) return;
  model::MoeSpec moe;
  moe.experts = experts;
  moe.top_k = row.integer("top_k", 2);
  moe.expert_ffn = row.integer("moe_ffn_hidden", spec.blocks.front().mlp.ffn);
  moe.shared_ffn = row.integer("shared_experts") * moe.expert_ffn;
  const std::string family = lower_case(row.text("model"));
  const bool deepseek = family.find("deepseek") != std::string::npos || family.find("kimi") != std::string::npos || family.find("moonlight") != std::string::npos;
  int64_t dense_layers = 0;
  if (deepseek) {
    dense_layers = family.find("kimi") != std::string::npos || family.find("moonlight") != std::string::npos || spec.hidden < 7000 ? 1 : 3;
    for (model::BlockSpec& block : spec.blocks) block.attention.latent = deepseek_attention(spec.hidden);
    assumptions.push_back("latent attention of the DeepSeek-V3 sizes");
    if (family.find("deepseekv3") != std::string::npos || family.find("deepseek v3") != std::string::npos || family.find("deepseek-v3") != std::string::npos) spec.mtp_layers = 1;
  }
  for (size_t layer = static_cast<size_t>(dense_layers); layer < spec.blocks.size(); ++layer) {
    spec.blocks[layer].moe = moe;
    spec.blocks[layer].mlp.gated = family.find("nemotron") == std::string::npos;
  }
}

/// A state-space scan costs what attention to this many tokens costs: the Mamba-2 paper (arXiv 2405.21060, figure 10) has its
/// kernels at the speed of FlashAttention-2 for sequences of 2,000 to 4,000.
constexpr int64_t kScanReach = 2000;

/// Mamba-2, attention and expert layers in the proportions of Nemotron 3 (23 : 6 : 23): one block stands for a mixer and an
/// expert layer. The mixer's products are 6 h^2 per token, like attention with 1.5 h wide heads.
void make_hybrid(const RunRow& row, model::ModelSpec& spec, std::vector<std::string>& assumptions) {
  const size_t layers = spec.blocks.size(), pairs = std::max<size_t>(1, layers * 23 / 52);
  model::BlockSpec attention = spec.blocks.back();
  attention.moe.reset();
  attention.mlp.ffn = 0;
  spec.blocks.resize(pairs, spec.blocks.back());
  const bool wide = row.integer("experts") >= 512;  // the Super size: experts in a quarter of the width
  for (model::BlockSpec& block : spec.blocks) {
    block.attention.kv_heads = block.attention.heads = 3 * spec.hidden / 2 / block.attention.head_dim;
    block.attention.window = kScanReach;
    if (!block.moe) continue;
    block.moe->shared_ffn = 2 * block.moe->expert_ffn;
    if (wide) block.moe->latent_dim = spec.hidden / 4;
  }
  spec.blocks.insert(spec.blocks.begin() + static_cast<std::ptrdiff_t>(pairs / 2), layers * 6 / 52, attention);
  assumptions.push_back("hybrid layer mix of Nemotron 3");
}

/// Vocabulary of a model whose row does not say it: its family's published configuration, else the padded GPT-2 one or Llama's.
int64_t usual_vocab(const std::string& family, bool gpt, std::vector<std::string>& assumptions) {
  constexpr std::pair<const char*, int64_t> kFamilies[] = {
      {"internlm2", 92544}, {"internlm", 103168}, {"llama-3", 128256}, {"llama3", 128256}, {"llama 3", 128256}, {"gpt-oss", 201088}, {"gpt oss", 201088},
      {"deepseek", 129280}, {"kimi", 163840},     {"moonlight", 163840}, {"nemotron-4", 256000}, {"nemotron", 131072}, {"qwen", 151936}, {"gemma", 256000},
      {"bloom", 250880},    {"falcon", 65024},    {"opt-", 50272},     {"mpt", 50368}};
  int64_t vocab = gpt ? 51200 : 32000;
  for (const auto& [name, size] : kFamilies) {
    if (family.find(name) == std::string::npos) continue;
    vocab = size;
    break;
  }
  assumptions.push_back(fmt::format("vocab {}", vocab));
  return vocab;
}

model::ModelSpec spec_of_run(const RunRow& row, std::vector<std::string>& assumptions) {
  model::ModelSpec spec;
  spec.name = row.text("model");
  spec.hidden = row.integer("hidden");
  spec.context = row.integer("seq_len");
  const bool gpt = is_gpt(row);
  spec.family = gpt ? "gpt2" : "llama";
  spec.norm = gpt ? model::NormKind::layer : model::NormKind::rms;
  spec.norm_bias = gpt;
  spec.position = gpt ? model::PositionKind::learned : model::PositionKind::rope;
  spec.tied_head = gpt;
  spec.vocab = row.integer("vocab", 0);
  if (spec.vocab == 0) spec.vocab = usual_vocab(lower_case(spec.name), gpt, assumptions);
  const int64_t tp = row.integer("tp", 1);
  spec.vocab = (spec.vocab + tp - 1) / tp * tp;
  spec.blocks.assign(static_cast<size_t>(row.integer("layers")), block_of_run(row, gpt, assumptions));
  add_experts(row, spec, assumptions);
  if (row.text("kind") == "hybrid" || lower_case(row.text("model")).find("nemotron-3") != std::string::npos) make_hybrid(row, spec, assumptions);
  return spec;
}

layout::Layout layout_of_run(const RunRow& row, const machine::Software& software, std::vector<std::string>& assumptions) {
  layout::Layout layout;
  const int64_t devices = row.integer("gpus");
  layout.pp = row.integer("pp", 1);
  layout.chunks = layout.pp > 1 ? std::max<int64_t>(1, row.integer("vpp", 1)) : 1;
  layout.tp = row.integer("tp", 1);
  layout.cp = std::max<int64_t>(1, row.integer("cp", 1));
  layout.ep = std::max<int64_t>(1, row.integer("ep", 1));
  layout.etp = std::max<int64_t>(1, row.integer("etp", 1));
  const int64_t model_ranks = layout.pp * layout.tp * layout.cp;
  if (devices % model_ranks != 0) throw ConfigError(fmt::format("tp * pp * cp = {} does not divide {} devices", model_ranks, devices));
  layout.dp = devices / model_ranks;
  // A dispatcher moves tokens to experts on other ranks: named without a degree, the experts are spread as far as they go.
  const int64_t experts = row.integer("experts");
  if (experts > 1 && row.text("ep").empty() && lower_case(row.text("notes")).find("deepep") != std::string::npos) {
    layout.ep = std::gcd(experts, layout.dp * layout.cp * layout.tp);
    assumptions.push_back(fmt::format("ep {}", layout.ep));
  }
  layout.micro_batch = row.integer("micro_batch", 1);
  layout.global_batch = row.integer("global_batch_seqs", 1);
  if (layout.global_batch % (layout.dp * layout.micro_batch) != 0)
    throw ConfigError(fmt::format("global batch {} is not a multiple of dp * micro-batch = {}", layout.global_batch, layout.dp * layout.micro_batch));
  fill_strategy(row, software, layout, assumptions);
  return layout;
}

}  // namespace

const std::string& RunRow::text(const std::string& column) const {
  static const std::string kBlank;
  const auto found = fields_.find(column);
  return found == fields_.end() ? kBlank : found->second;
}

double RunRow::number(const std::string& column, double otherwise) const {
  const std::string& value = text(column);
  if (value.empty()) return otherwise;
  size_t used = 0;
  double parsed = 0;
  try {
    parsed = std::stod(value, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (used == 0) throw ConfigError(fmt::format("column {} holds \"{}\", which is not a number", column, value));
  return parsed;
}

int64_t RunRow::integer(const std::string& column, int64_t otherwise) const {
  const double value = number(column, static_cast<double>(otherwise));
  return static_cast<int64_t>(value);
}

std::vector<RunRow> read_runs(const std::string& path) {
  std::ifstream in(path);
  if (!in) throw ConfigError("runs file \"" + path + "\" cannot be read; give a CSV file with a header line");
  std::vector<std::string> header, fields;
  if (!read_record(in, header) || std::find(header.begin(), header.end(), "id") == header.end())
    throw ConfigError("runs file \"" + path + "\" has no id column in its header line");
  std::vector<RunRow> rows;
  while (read_record(in, fields)) {
    if (fields.size() == 1 && fields[0].empty()) continue;
    if (fields.size() != header.size())
      throw ConfigError(fmt::format("runs file \"{}\", record {}: {} fields, the header has {}", path, rows.size() + 1, fields.size(), header.size()));
    std::map<std::string, std::string> named;
    for (size_t i = 0; i < header.size(); ++i) named[header[i]] = fields[i];
    rows.emplace_back(std::move(named));
  }
  return rows;
}

Job job_of_run(const RunRow& row, std::vector<std::string>& assumptions) {
  std::string missing;
  for (const char* column : kRequired)
    if (row.text(column).empty()) missing += (missing.empty() ? "" : " ") + std::string(column);
  if (!missing.empty()) throw ConfigError("missing " + missing);
  Job job;
  const std::string device = row.text("gpu");
  job.machine = machine_of_run(row);
  job.precision = machine::parse_precision(row.text("precision"));
  job.sequence = row.integer("seq_len");
  job.software = software_of_run(row, job.machine);
  job.layout = layout_of_run(row, job.software, assumptions);
  job.model = ModelSummary::of(spec_of_run(row, assumptions), job.sequence);
  return job;
}

namespace {

/// A row that is silent about recompute may have used any, or offloading that hides: its memory is that of the mildest
/// recompute that fits. Its time is taken without, because what hides best is what tuned runs choose.
Memory unstated_memory(Job job, const cost::Tuning& tuning, std::vector<std::string>& assumptions) {
  Memory memory;
  for (const layout::Recompute recompute : {layout::Recompute::none, layout::Recompute::half, layout::Recompute::full}) {
    job.layout.recompute = recompute;
    memory = peak_memory(job, tuning);
    if (memory.fit_probability >= 0.5) break;
  }
  if (job.layout.recompute != layout::Recompute::none) assumptions.push_back(fmt::format("memory with recompute {}", layout::recompute_name(job.layout.recompute)));
  return memory;
}

}  // namespace

RunPrediction predict_run(const RunRow& row, const cost::Tuning& tuning) {
  RunPrediction out;
  out.id = row.text("id");
  try {
    std::vector<std::string> assumptions;
    const Job job = job_of_run(row, assumptions);
    const Estimate estimated = estimate(job, tuning);
    out.step_time_s = estimated.time.step;
    const std::string kind = row.text("mem_kind");
    const Memory memory = row.text("recompute").empty() ? unstated_memory(job, tuning, assumptions) : estimated.memory;
    const double bytes = kind == "device" ? memory.device() : kind == "reserved" ? memory.reserved() : kind == "analytic" ? analytic_bytes(job) : memory.allocated();
    out.peak_mem_gib = bytes / kGiB;
    out.p_fit = kind == "analytic" ? fit_probability(bytes, job.machine.device.memory_gib * kGiB, tuning.fit_sigma) : memory.fit_probability;
    for (const std::string& assumption : assumptions) out.assumptions += (out.assumptions.empty() ? "" : "; ") + assumption;
  } catch (const Error& error) {
    out.reason = error.what();
  }
  return out;
}

void write_predictions(std::ostream& out, const std::vector<RunPrediction>& predictions) {
  out << "id,step_time_s,peak_mem_gb,fits,p_fit,reason\n";
  const auto quoted = [](std::string text) {
    std::replace(text.begin(), text.end(), '"', '\'');
    std::replace(text.begin(), text.end(), '\n', ' ');
    return "\"" + text + "\"";
  };
  for (const RunPrediction& prediction : predictions) {
    if (!prediction.reason.empty()) out << fmt::format("{},,,,,{}\n", prediction.id, quoted(prediction.reason));
    else
      out << fmt::format("{},{:.6g},{:.6g},{},{:.4f},{}\n", prediction.id, prediction.step_time_s, prediction.peak_mem_gib, prediction.p_fit >= 0.5 ? "yes" : "no",
                         prediction.p_fit, prediction.assumptions.empty() ? "" : quoted("assumed " + prediction.assumptions));
  }
}

}  // namespace weft::plan
