// The answer in words: which pressure each decision relieves, and what more of something would bring.
#include <fmt/format.h>

#include <algorithm>

#include "weft/cost/memory.h"
#include "weft/plan/search.h"

namespace weft::plan {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;

/// Activations and states of the plainest layout: one device, micro-batch 1.
Memory plain_memory(const SearchRequest& request, const cost::Tuning& tuning) {
  Job job;
  job.model = ModelSummary::of(request.spec, request.sequence);
  job.machine = request.machine;
  job.software = request.software;
  job.precision = request.precision;
  job.sequence = request.sequence;
  return peak_memory(job, tuning);
}

void explain_states(const SearchRequest& request, const Memory& plain, const layout::Layout& best, std::vector<std::string>& lines) {
  const double capacity = request.machine.device.memory_gib;
  const double states = (plain.weights + plain.gradients + plain.optimizer) / kGiB, weights = (plain.weights + plain.gradients) / kGiB;
  const double ranks = static_cast<double>(request.devices);
  if (plain.device() / kGiB <= capacity) {
    lines.push_back(fmt::format("One device holds everything ({:.0f} of {:.0f} GiB), so plain data parallelism works: every other axis only adds communication.", plain.device() / kGiB, capacity));
  } else if (states <= capacity) {
    lines.push_back(fmt::format("The states fit on one device ({:.0f} GiB), the activations of the whole model do not: recompute, smaller micro-batches or a split are needed.", states));
  } else if (weights + (states - weights) / ranks <= capacity) {
    lines.push_back(fmt::format("States of {:.0f} GiB exceed a device of {:.0f} GiB, and {:.0f} GiB of them are optimizer state: ZeRO-1 divides that over data-parallel ranks at no extra traffic.",
                                states, capacity, states - weights));
  } else {
    lines.push_back(fmt::format("Weights and gradients alone are {:.0f} GiB and a device has {:.0f}: the weights must be divided, by FSDP (zero 3), tensor or pipeline parallelism.", weights, capacity));
  }
  if (best.zero == 0 && best.dp > 1) lines.push_back("zero 0: gradients are all-reduced; every replica keeps whole states.");
  if (best.zero == 1) lines.push_back(fmt::format("zero 1: optimizer state divided over {} ranks; the reduction becomes reduce-scatter plus gather, the same bytes.", best.shard_ranks()));
  if (best.zero == 3)
    lines.push_back(fmt::format("zero 3: parameters gathered block by block over {} ranks, 1.5 times the traffic of zero 1, hidden behind {} tokens of compute per rank.", best.shard_ranks(),
                                request.sequence * best.micro_batch / best.cp));
}

void explain_axes(const SearchRequest& request, const Candidate& best, std::vector<std::string>& lines) {
  const layout::Layout& layout = best.layout;
  if (layout.tp > 1)
    lines.push_back(fmt::format("tp {}: products of {} layers are cut inside one link domain of {} devices; exposed communication costs {:.1f}% of the step.", layout.tp, request.spec.layers(),
                                request.machine.link_domain, 100 * best.time.tp / best.time.step));
  if (layout.pp > 1) {
    const double fraction = static_cast<double>(layout.pp - 1) / static_cast<double>(layout.chunks) / static_cast<double>(layout.micro_batches());
    lines.push_back(fmt::format("pp {}{}: stages pass {} micro-batches; fill and drain is {:.1f}% over ideal, {:.1f}% of the step with uneven stages.", layout.pp,
                                layout.chunks > 1 ? fmt::format(" with {} chunks", layout.chunks) : "", layout.micro_batches(), 100 * fraction, 100 * best.time.bubble / best.time.step));
  }
  if (layout.cp > 1) lines.push_back(fmt::format("cp {}: {} tokens are too long for one rank's activations; the ring hides behind attention except {:.1f}% of the step.", layout.cp, request.sequence, 100 * best.time.cp / best.time.step));
  if (layout.ep > 1) lines.push_back(fmt::format("ep {}: experts divided; dispatch and combine take {:.1f}% of the step.", layout.ep, 100 * best.time.ep / best.time.step));
  if (layout.schedule == "zb-h1" || layout.schedule == "zb-v")
    lines.push_back(fmt::format("{}: weight gradients are put off into the bubble; every stage then holds activations of {} micro-batches.", layout.schedule, std::min(layout.pp, layout.micro_batches())));
  if (layout.offload) lines.push_back(fmt::format("offload: optimizer state would not fit on the device; the step in host memory costs {:.1f}% of the step.", 100 * best.time.optimizer / best.time.step));
  if (layout.recompute != layout::Recompute::none)
    lines.push_back(fmt::format("recompute {}: activations would not fit otherwise; it costs {:.1f}% of the step.", layout::recompute_name(layout.recompute), 100 * best.time.recompute / best.time.step));
}

std::string host_words(const SearchRequest& request) {
  if (request.machine.host_memory_gib <= 0) return "The optimizer cannot be offloaded: this machine has no host memory beside its devices'.";
  return fmt::format("Offloading the optimizer would need more than the {:.0f} GiB of a node's host (--host-memory) for some layouts; they were left out.", request.machine.host_memory_gib);
}

/// The least doubling of the devices with which something fits, or nothing.
std::string enough_devices(SearchRequest request, const cost::Tuning& tuning) {
  constexpr int kDoublings = 7;
  for (int i = 0; i < kDoublings; ++i) {
    request.devices *= 2;
    request.global_batch = std::max(request.global_batch, request.devices);
    if (!check(request).empty()) return "";
    const SearchResult result = search(request, tuning);
    if (!result.ranked.empty())
      return fmt::format("{} devices are enough: {} needs {:.1f} GiB on the fullest rank.", request.devices, result.ranked.front().layout.text(), result.ranked.front().memory.device() / kGiB);
  }
  return "";
}

}  // namespace

std::vector<std::string> explain(const SearchRequest& request, const SearchResult& result, const cost::Tuning& tuning) {
  std::vector<std::string> lines;
  if (result.ranked.empty()) {
    lines.push_back(fmt::format("Nothing fits on {} devices of {:.0f} GiB.", request.devices, request.machine.device.memory_gib));
    if (const std::string enough = enough_devices(request, tuning); !enough.empty()) lines.push_back(enough);
    if (result.host_short) lines.push_back(host_words(request));
    if (!result.rejected.empty()) lines.push_back(fmt::format("Nearest: {}: {}.", result.rejected.front().layout.text(), result.rejected.front().reason));
    return lines;
  }
  const Candidate& best = result.ranked.front();
  explain_states(request, plain_memory(request, tuning), best.layout, lines);
  explain_axes(request, best, lines);
  return lines;
}

std::vector<Sensitivity> sensitivity(const SearchRequest& request, const SearchResult& result, const cost::Tuning& tuning) {
  std::vector<Sensitivity> out;
  if (result.ranked.empty()) return out;
  const double rate = result.ranked.front().tokens_per_second;
  const auto attempt = [&](const std::string& change, const SearchRequest& changed) {
    if (!check(changed).empty()) return;
    const SearchResult other = search(changed, tuning);
    if (!other.ranked.empty()) out.push_back({change, other.ranked.front().tokens_per_second / rate - 1, other.ranked.front().layout.text()});
  };
  SearchRequest changed = request;
  changed.machine.nic_gbits *= 2;
  if (request.devices > request.machine.link_domain) attempt("twice the network bandwidth", changed);
  changed = request;
  changed.machine.device.memory_gib *= 1.5;
  attempt("half as much memory again", changed);
  changed = request;
  changed.global_batch *= 2;
  attempt("twice the global batch", changed);
  changed = request;
  changed.devices *= 2;
  if (request.global_batch % changed.devices == 0 || request.global_batch > changed.devices) attempt("twice the devices", changed);
  return out;
}

}  // namespace weft::plan
