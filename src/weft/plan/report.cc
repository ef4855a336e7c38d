#include "weft/plan/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "weft/core/units.h"

namespace weft::plan {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;
constexpr int kBarWidth = 28;

struct Line {
  const char* name;
  double value;
};

std::vector<Line> memory_lines(const Memory& memory) {
  return {{"weights", memory.weights},       {"gradients", memory.gradients},     {"optimizer state", memory.optimizer}, {"activations", memory.activations},
          {"logits and loss", memory.logits}, {"in flight", memory.transient},     {"allocator cache", memory.reserve},   {"context, NCCL", memory.context}};
}

std::vector<Line> time_lines(const Time& time) {
  return {{"matrix products", time.gemm},     {"attention", time.attention},       {"memory-bound kernels", time.memory}, {"waiting for host", time.host},
          {"recompute", time.recompute},      {"tensor parallel", time.tp},        {"context parallel", time.cp},         {"expert parallel", time.ep},
          {"pipeline sends", time.pp},        {"data parallel", time.dp},          {"pipeline bubble", time.bubble},      {"optimizer", time.optimizer},
          {"fixed, stragglers", time.fixed}};
}

std::string snake(std::string name) {
  std::string out;
  for (char c : name) {
    if (c == ',') continue;
    out += c == ' ' || c == '-' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return out;
}

std::string rule(const std::string& title) { return fmt::format("\n{}\n", title); }

}  // namespace

std::string bar(double share, int width) {
  static const char* const kEighths[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const int eighths = static_cast<int>(std::lround(std::clamp(share, 0.0, 1.0) * width * 8));
  std::string out;
  for (int i = 0; i < eighths / 8; ++i) out += "█";
  out += kEighths[eighths % 8];
  const int used = eighths / 8 + (eighths % 8 > 0 ? 1 : 0);
  return out + std::string(static_cast<size_t>(width - used), ' ');
}

std::string estimate_text(const Job& job, const Estimate& estimate, const Rates& rates) {
  const Memory& memory = estimate.memory;
  const Time& time = estimate.time;
  const double capacity = job.machine.device.memory_gib * kGiB, devices = static_cast<double>(job.layout.devices());
  std::string out = fmt::format("{} x {}   {}   {}   {} tokens x {} sequences, {} micro-batches\n", job.layout.devices(), job.machine.device.name, job.layout.text(),
                                machine::precision_name(job.precision), job.sequence, job.layout.global_batch, job.layout.micro_batches());
  out += rule(fmt::format("Memory on the fullest rank (stage {} of {})", memory.stage, job.layout.pp));
  for (const Line& line : memory_lines(memory))
    if (line.value > 0) out += fmt::format("  {:<22}{:>8.2f} GiB  {}\n", line.name, line.value / kGiB, bar(line.value / capacity, kBarWidth));
  out += fmt::format("  {:<22}{:>8.2f} GiB  of {:.1f}; allocated {:.2f}, reserved {:.2f}; fits with probability {:.0f}%\n", "total", memory.device() / kGiB, capacity / kGiB, memory.allocated() / kGiB,
                     memory.reserved() / kGiB, 100 * memory.fit_probability);
  if (memory.host > 0)
    out += fmt::format("  {:<22}{:>8.1f} GiB  of {:.0f} on the host of a node, shared by its devices{}\n", "offloaded", host_bytes(memory, job) / kGiB, job.machine.host_memory_gib,
                       host_fits(memory, job) ? "" : ": DOES NOT FIT; use more nodes, or --host-memory if yours has more");
  out += rule("Time of one step");
  for (const Line& line : time_lines(time))
    if (line.value / time.step >= 0.0005) out += fmt::format("  {:<22}{:>10}  {:>5.1f}%  {}\n", line.name, seconds_text(line.value), 100 * line.value / time.step, bar(line.value / time.step, kBarWidth));
  out += fmt::format("  {:<22}{:>10}  p95 {}\n", "step", seconds_text(time.step), seconds_text(time.step_p95));
  out += rule("Rates");
  out += fmt::format("  {} ({} per device)\n", rate_text(estimate.tokens_per_second, "tok"), rate_text(estimate.tokens_per_second_per_device, "tok"));
  out += fmt::format("  MFU {:.1f}% (causal half of attention), {:.1f}% (full attention); HFU {:.1f}% (recompute counted)\n", 100 * estimate.mfu, 100 * estimate.mfu_full, 100 * estimate.hfu);
  const double hours = devices / 3600;  // device-hours per second
  if (rates.price > 0)
    out += fmt::format("  {:.2f} per step, {:.0f} per billion tokens at {:.2f} per device-hour\n", hours * time.step * rates.price, hours * rates.price / estimate.tokens_per_second * 1e9, rates.price);
  if (rates.watts > 0)
    out += fmt::format("  {:.2f} kWh per step, {:.0f} kWh per billion tokens at {:.0f} W per device\n", hours * time.step * rates.watts / 1000, hours * rates.watts / 1000 / estimate.tokens_per_second * 1e9, rates.watts);
  return out;
}

Json layout_json(const layout::Layout& layout) {
  return {{"pp", layout.pp}, {"chunks", layout.chunks}, {"dp", layout.dp}, {"cp", layout.cp}, {"tp", layout.tp}, {"ep", layout.ep}, {"etp", layout.etp},
          {"sequence_parallel", layout.sequence_parallel}, {"zero", layout.zero}, {"shard_group", layout.shard_group}, {"micro_batch", layout.micro_batch},
          {"micro_batches", layout.micro_batches()}, {"global_batch", layout.global_batch}, {"recompute", layout::recompute_name(layout.recompute)}, {"schedule", layout.schedule}, {"offload", layout.offload}};
}

namespace {

Json memory_json(const Memory& memory) {
  Json out;
  for (const Line& line : memory_lines(memory)) out[snake(line.name) + "_gib"] = line.value / kGiB;
  if (memory.host > 0) out["host_gib_per_rank"] = memory.host / kGiB;
  out["stage"] = memory.stage;
  out["allocated_gib"] = memory.allocated() / kGiB;
  out["reserved_gib"] = memory.reserved() / kGiB;
  out["device_gib"] = memory.device() / kGiB;
  out["fit_probability"] = memory.fit_probability;
  return out;
}

Json time_json(const Time& time) {
  Json out;
  for (const Line& line : time_lines(time)) out[snake(line.name) + "_s"] = line.value;
  out["step_s"] = time.step;
  out["step_p95_s"] = time.step_p95;
  return out;
}

Json candidate_json(const Candidate& candidate) {
  return {{"layout", layout_json(candidate.layout)}, {"tokens_per_second", candidate.tokens_per_second}, {"step_s", candidate.time.step}, {"device_gib", candidate.memory.device() / kGiB},
          {"fit_probability", candidate.memory.fit_probability}, {"simulated", candidate.simulated}};
}

/// The term that costs most beside the products: what a reader would attack next.
std::string largest_loss(const Time& time) {
  Line largest{"", 0};
  for (const Line& line : time_lines(time)) {
    const std::string name = line.name;
    if (name != "matrix products" && name != "attention" && line.value > largest.value) largest = line;
  }
  return fmt::format("{} {:.0f}%", largest.name, 100 * largest.value / time.step);
}

/// Ranked layouts that differ only in micro-batch, chunks, recompute or expert degree from an earlier one are left out of the table.
std::vector<const Candidate*> distinct(const std::vector<Candidate>& ranked, size_t top) {
  std::vector<const Candidate*> out;
  for (const Candidate& candidate : ranked) {
    const bool seen = std::any_of(out.begin(), out.end(), [&](const Candidate* other) {
      const layout::Layout &a = candidate.layout, &b = other->layout;
      return a.tp == b.tp && a.pp == b.pp && a.cp == b.cp && a.zero == b.zero && a.ep == b.ep;
    });
    if (!seen) out.push_back(&candidate);
    if (out.size() == top) break;
  }
  return out;
}

/// What the shorthand of the shown layouts means, for its words that occur.
std::string legend(const std::vector<const Candidate*>& shown) {
  const std::pair<const char*, const char*> words[] = {
      {"tp", "tp2 tensor parallel over 2 devices"}, {"+sp", "+sp norms divided too"}, {" pp", "pp4x5 4 pipeline stages of 5 chunks"}, {" cp", "cp2 sequences cut in 2"},
      {" ep", "ep8 experts over 8"}, {" dp", "dp4 replicas"}, {" zero", "zero0 whole states, 1 optimizer, 3 everything (FSDP) divided"}, {"/", "/8 among 8"},
      {" mb", "mb2 sequences at once"}, {" rc:", "rc recompute"}, {" zb-", "zb-h1, zb-v zero-bubble schedules"}, {" offload", "offload optimizer in host memory"}};
  constexpr size_t kColumns = 120;
  std::string out, line = "    ";
  for (const auto& [word, meaning] : words) {
    const bool occurs = std::any_of(shown.begin(), shown.end(), [&, text = word](const Candidate* candidate) { return candidate->layout.text().find(text) != std::string::npos; });
    if (!occurs) continue;
    if (line.size() + std::string(meaning).size() > kColumns) out += line + "\n", line = "    ";
    line += std::string(" ") + meaning + ";";
  }
  line.pop_back();
  return out + line + "\n";
}

}  // namespace

Json estimate_json(const Job& job, const Estimate& estimate, const Rates& rates) {
  Json out = {{"device", job.machine.device.name}, {"devices", job.layout.devices()}, {"precision", machine::precision_name(job.precision)}, {"sequence", job.sequence},
              {"parameters", job.model.total_parameters}, {"layout", layout_json(job.layout)}, {"memory", memory_json(estimate.memory)}, {"time", time_json(estimate.time)},
              {"tokens_per_second", estimate.tokens_per_second}, {"tokens_per_second_per_device", estimate.tokens_per_second_per_device}, {"mfu_causal", estimate.mfu},
              {"mfu_full_attention", estimate.mfu_full}, {"hfu_causal", estimate.hfu}};
  const double hours_per_billion = static_cast<double>(job.layout.devices()) / 3600 / estimate.tokens_per_second * 1e9;
  if (rates.price > 0) out["price_per_billion_tokens"] = rates.price * hours_per_billion;
  if (rates.watts > 0) out["kwh_per_billion_tokens"] = rates.watts / 1000 * hours_per_billion;
  return out;
}

std::string search_text(const SearchRequest& request, const SearchResult& result, const std::vector<std::string>& words, const std::vector<Sensitivity>& sensitivities, size_t top) {
  std::string out = fmt::format("{}: {} on {} x {}, {}, {} sequences of {} tokens\n", request.spec.name, count_text(static_cast<double>(model::parameter_count(request.spec))), request.devices,
                                request.machine.device.name, machine::precision_name(request.precision), request.global_batch, request.sequence);
  out += fmt::format("{} legal layouts, {} fit{}; searched in {}\n", result.considered, result.fitting,
                     result.simulated > 0 ? fmt::format(", the best {} pipelines simulated action by action", result.simulated) : "", seconds_text(result.seconds));
  if (!result.ranked.empty()) {
    out += rule("  #  layout                                        step       tok/s/device   memory   speed         largest loss");
    const double best = result.ranked.front().tokens_per_second;
    size_t number = 0;
    const std::vector<const Candidate*> shown = distinct(result.ranked, top);
    for (const Candidate* candidate : shown)
      out += fmt::format("{:>3}  {:<44}{:>9}{:>14.0f}{:>9.1f} GiB  {} {}\n", ++number, candidate->layout.text(), seconds_text(candidate->time.step),
                         candidate->tokens_per_second / static_cast<double>(request.devices), candidate->memory.device() / kGiB, bar(candidate->tokens_per_second / best, 12), largest_loss(candidate->time));
    out += legend(shown);
  }
  out += rule("Why");
  for (const std::string& line : words) out += "  " + line + "\n";
  if (!result.rejected.empty()) {
    out += rule("What does not fit, nearest first");
    for (size_t i = 0; i < std::min<size_t>(5, result.rejected.size()); ++i) {
      const Rejection& rejection = result.rejected[i];
      out += fmt::format("  {:<44} {}\n", rejection.layout.text(), rejection.reason);
      if (!rejection.change.empty()) out += fmt::format("  {:<44} -> {}\n", "", rejection.change);
    }
  }
  if (result.pareto.size() > 1) {
    out += rule("Less memory for less speed");
    for (size_t i = 0; i < std::min<size_t>(6, result.pareto.size()); ++i)
      out += fmt::format("  {:<44}{:>9}{:>9.1f} GiB\n", result.pareto[i].layout.text(), seconds_text(result.pareto[i].time.step), result.pareto[i].memory.device() / kGiB);
  }
  if (!sensitivities.empty()) {
    out += rule("What would help (tokens/s of the best layout)");
    for (const Sensitivity& item : sensitivities) out += fmt::format("  {:<30}{:>+7.1f}%   {}\n", item.change, 100 * item.gain, item.layout);
  }
  return out;
}

Json search_json(const SearchRequest& request, const SearchResult& result, const std::vector<std::string>& words, const std::vector<Sensitivity>& sensitivities, size_t top) {
  Json out = {{"model", request.spec.name}, {"devices", request.devices}, {"device", request.machine.device.name}, {"considered", result.considered}, {"fitting", result.fitting}, {"simulated", result.simulated}, {"seconds", result.seconds}};
  for (const char* list : {"ranked", "pareto", "rejected", "sensitivity"}) out[list] = Json::array();
  for (size_t i = 0; i < std::min(top, result.ranked.size()); ++i) out["ranked"].push_back(candidate_json(result.ranked[i]));
  for (const Candidate& candidate : result.pareto) out["pareto"].push_back(candidate_json(candidate));
  for (const Rejection& rejection : result.rejected)
    out["rejected"].push_back({{"layout", layout_json(rejection.layout)}, {"over_gib", rejection.over_gib}, {"reason", rejection.reason}, {"change", rejection.change}});
  for (const Sensitivity& item : sensitivities) out["sensitivity"].push_back({{"change", item.change}, {"gain", item.gain}, {"layout", item.layout}});
  out["explanation"] = words;
  return out;
}

}  // namespace weft::plan
