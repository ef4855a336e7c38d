#include "weft/train/memory_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "weft/core/error.h"
#include "weft/core/units.h"
#include "weft/cost/memory.h"
#include "weft/memory/table.h"

namespace weft::train {
namespace {

using memory::Amounts;
using memory::Category;

std::string to_text(const memory::Usage& usage) {
  std::ostringstream out;
  out << usage.live << ' ' << usage.peak << ' ' << usage.allocations;
  for (const Amounts* amounts : {&usage.live_of, &usage.at_peak, &usage.peak_of}) {
    for (const int64_t bytes : *amounts) out << ' ' << bytes;
  }
  return out.str();
}

memory::Usage from_text(const std::string& text) {
  memory::Usage usage;
  std::istringstream in(text);
  in >> usage.live >> usage.peak >> usage.allocations;
  for (Amounts* amounts : {&usage.live_of, &usage.at_peak, &usage.peak_of}) {
    for (int64_t& bytes : *amounts) in >> bytes;
  }
  return usage;
}

/// Bytes of `activations` that go where all blocks are recomputed: all but one block's and each one's input, as far as blocks have them.
double freed_by_recompute(const Job& job, double activations) {
  cost::ActivationShape shape;
  shape.tokens = static_cast<double>(job.accumulation.micro_batch * job.config.data.seq);
  shape.sequence = static_cast<double>(job.config.data.seq);
  shape.tp = static_cast<double>(job.config.layout.tp);
  shape.sequence_parallel = job.config.parallel.sequence_parallel;
  const auto hidden = static_cast<double>(job.spec.hidden), layers = static_cast<double>(job.spec.layers());
  const model::BlockSpec& block = job.spec.blocks.front();
  const cost::BlockBytes bytes = cost::block_bytes(block, hidden, /*layer_norm=*/false, shape, {});
  const double input = cost::kept_bytes(block, bytes, hidden, shape, layout::Recompute::full, /*flash=*/true);
  const double blocks = layers * bytes.total() * static_cast<double>(c10::elementSize(job.dtype)) / 2;  // it counts 16 bits
  return std::min(activations, blocks) * (layers - 1) / layers * (1 - input / bytes.total());
}

struct Lever {
  std::string text;
  int64_t frees = 0;      ///< bytes, estimated from what is live
  bool same_run = false;  ///< losses stay what they were, but for rounding
};

std::vector<Lever> levers(const Job& job, const memory::Usage& usage) {
  const auto& c = job.config;
  const int64_t activations = usage.of(Category::activations);
  std::vector<Lever> list;
  const auto add = [&](const std::string& text, int64_t frees, bool same_run = false) {
    if (frees > 0) list.push_back({text, frees, same_run});
  };
  if (job.accumulation.micro_batch > 1) {
    const int64_t now = job.accumulation.micro_batch, half = now / 2;
    add(fmt::format("train.micro_batch = {} (now {}): fewer samples at once, more forward passes per update, the same result",
                    half, now),
        activations - activations * half / now, true);
  }
  const int64_t dp = job.accumulation.dp, zero = c.parallel.zero;
  if (dp > 1 && zero < 3) {
    // What zero = 3 would share out and the present position does not yet.
    int64_t shared = usage.of(Category::parameters);
    if (zero < 2) shared += usage.of(Category::gradients);
    if (zero < 1) shared += usage.of(Category::optimizer);
    add(fmt::format("parallel.zero = 3 (now {}): every rank keeps a part of what all keep now, the same result", zero),
        shared - shared / dp, true);
  }
  if (c.train.recompute != "full" && !c.train.offload_activations) {
    add(fmt::format("train.recompute = \"full\" (now {}): the blocks' activations are computed again in backward, some third more time, the "
                    "same result", c.train.recompute),
        static_cast<int64_t>(freed_by_recompute(job, static_cast<double>(activations))), true);
  }
  if (c.train.dtype == "fp64") add("train.dtype = \"fp32\": half the bytes of everything", usage.live / 2);
  if (c.train.dtype == "fp32") add("train.dtype = \"bf16\": half the bytes of activations", activations / 2);
  if (c.data.seq > 1) {
    add(fmt::format("data.seq = {} (now {}): shorter samples", c.data.seq / 2, c.data.seq), activations / 2);
  }
  if (c.train.ema > 0 && c.train.dtype != "fp64") {
    const int64_t states = (c.optimizer.name == "adamw" ? 2 : 1) + (c.train.dtype == "fp32" ? 0 : 1);
    add("train.ema = 0: no average of the weights", usage.of(Category::optimizer) / (states + 1));
  }
  if (c.offload.optimizer != "nvme" && config::can_offload(c.optimizer.name)) {
    constexpr double kMiB = 1 << 20;
    const auto buffers = static_cast<int64_t>(c.offload.buffer_mb * kMiB) * c.offload.buffers;
    add("offload.optimizer = \"nvme\", and offload.dir: the optimizer's state in a file, slower updates, the same result",
        usage.of(Category::optimizer) - buffers, true);
  }
  if (c.optimizer.name == "adamw" && c.offload.optimizer != "nvme") {
    const int64_t now = usage.of(Category::optimizer), moments = c.train.dtype == "bf16" || c.train.dtype == "fp16" ? now * 2 / 3 : now;
    add("optimizer.name = \"adam8bit\": moments in 8 bits instead of 32", moments * 3 / 4);
  }
  return list;
}

}  // namespace

std::vector<memory::Usage> usage_of_ranks(const Comm& comm) {
  const bool counting = memory::account(memory::Space::cpu).counting();
  std::vector<memory::Usage> ranks;
  for (const std::string& text : comm.all_gather_text(counting ? to_text(memory::usage()) : "")) {
    if (!text.empty()) ranks.push_back(from_text(text));
  }
  return counting ? ranks : std::vector<memory::Usage>();
}

std::string memory_table(const std::vector<memory::Usage>& ranks, bool every_rank) {
  if (ranks.empty()) return {};
  std::vector<memory::TableRow> rows;
  size_t largest = 0;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    rows.push_back({fmt::format("rank {}", rank), ranks[rank].at_peak});
    if (ranks[rank].peak > ranks[largest].peak) largest = rank;
  }
  if (!every_rank) rows = {rows[largest]};
  return memory::table("peak memory", rows);
}

std::string largest_lever(const Job& job, const memory::Usage& usage) {
  const std::vector<Lever> all = levers(job, usage);
  const auto best = std::max_element(all.begin(), all.end(), [](const Lever& a, const Lever& b) {
    return std::pair(a.frees, a.same_run) < std::pair(b.frees, b.same_run);
  });
  if (best == all.end()) return "a smaller model, or a machine with more memory";
  return fmt::format("{} (frees about {})", best->text, bytes_text(static_cast<double>(best->frees)));
}

void throw_out_of_memory(const Job& job, int rank, const std::string& what, const memory::Usage& usage) {
  throw ConfigError(fmt::format("rank {}: {}\n{}Largest lever: {}", rank, what,
                                memory::table("held and asked for", {{fmt::format("rank {}", rank), usage.live_of}}),
                                largest_lever(job, usage)));
}

}  // namespace weft::train
