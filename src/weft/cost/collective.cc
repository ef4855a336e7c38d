#include "weft/cost/collective.h"

#include <algorithm>
#include <cmath>

namespace weft::cost {
namespace {

/// NCCL's protocols (its tuner's starting values, src/graph/tuning.cc): base latency and latency per hop in microseconds,
/// share of the bandwidth that carries data.
struct Protocol {
  double base, link_hop, network_hop, tree_base, tree_hop, share;
};
constexpr Protocol kProtocols[] = {
    {6.6, 0.6, 2.7, 6.8, 5.0, 0.50},    // LL: 4 bytes of data, 4 of flag
    {14.0, 1.9, 4.0, 14.0, 8.5, 0.92},  // LL128: 120 of 128 bytes
    {8.4, 3.4, 14.0, 8.4, 14.0, 1.0},   // Simple
};
constexpr double kMicro = 1e-6;
// NCCL's all-reduce on 8 devices: 365 of 450 GB/s (H100), 682 of 900 (B200), 240 of 300 (A100).
constexpr double kLinkShare = 0.8;
constexpr double kTreeShare = 0.92;      // a tree's links carry both directions at once
constexpr double kSwitchShare = 0.85;    // of the link rate, and
constexpr double kSwitchBase = 20.0;     // microseconds: in-switch reduction on NVLink 4
constexpr double kPeerHop = 12.0;        // microseconds per message over the network, send to matching receive

double bandwidth(const Group& group) { return group.per_domain < group.ranks ? std::min(group.link, group.network) : group.link; }

double ring_latency(const Protocol& protocol, const Group& group) {
  const double domains = std::ceil(group.domains());
  const double across = domains > 1 ? domains : 0;
  return protocol.link_hop * std::max(0.0, group.ranks - 1 - across) + protocol.network_hop * across;
}

}  // namespace

double all_reduce_factor(double ranks) { return 2 * (ranks - 1) / ranks; }
double all_gather_factor(double ranks) { return (ranks - 1) / ranks; }

double ring_all_gather_time(double bytes, double ranks, double alpha, double beta) { return (ranks - 1) * alpha + bytes * all_gather_factor(ranks) / beta; }
double ring_all_reduce_time(double bytes, double ranks, double alpha, double beta) { return 2 * ring_all_gather_time(bytes, ranks, alpha, beta); }
double tree_all_reduce_time(double bytes, double ranks, double alpha, double beta) { return 2 * std::log2(ranks) * alpha + 2 * bytes / beta; }

Group group_of(const machine::Machine& machine, int64_t ranks, int64_t stride, const Tuning& tuning) {
  Group group;
  group.ranks = static_cast<double>(ranks);
  const int64_t reach = std::max<int64_t>(1, machine.link_domain / std::max<int64_t>(1, stride));
  int64_t per_domain = std::min(ranks, reach);
  while (ranks % per_domain != 0) --per_domain;  // groups are laid out in equal parts
  group.per_domain = static_cast<double>(per_domain);
  const machine::Device& device = machine.device;
  // Devices without links talk through the host: its rate, shared with the copy out.
  group.link = 1e9 * (device.link_gbps > 0 ? device.link_gbps * (device.calibrated ? 1 : kLinkShare) : device.host_gbps * 0.5);
  double nic = 1e9 / 8 * machine.nic_gbits * tuning.nic_share;
  if (machine.host_network) nic *= tuning.omni_path_share;
  if (machine.pod_devices > 0 && ranks * stride > machine.pod_devices) nic /= machine.oversubscription;
  group.network = nic * group.per_domain;
  group.in_switch = device.generation >= 9 && machine.link_domain >= 8;
  return group;
}

double slowdown_of(double channels, const machine::Machine& machine) {
  return std::min(1.0, channels / static_cast<double>(machine.device.multiprocessors));
}

double all_gather_time(double bytes, const Group& group) {
  if (group.ranks <= 1 || bytes <= 0) return 0;
  double best = 1e30;
  for (const Protocol& protocol : kProtocols)
    best = std::min(best, kMicro * (protocol.base + ring_latency(protocol, group)) + bytes * all_gather_factor(group.ranks) / (bandwidth(group) * protocol.share));
  return best;
}

double all_reduce_time(double bytes, const Group& group) {
  if (group.ranks <= 1 || bytes <= 0) return 0;
  double best = 1e30;
  const double domains = std::ceil(group.domains());
  for (const Protocol& protocol : kProtocols) {
    const double rate = bandwidth(group) * protocol.share;
    best = std::min(best, kMicro * (protocol.base + 2 * ring_latency(protocol, group)) + bytes * all_reduce_factor(group.ranks) / rate);
    const double hops = 2 * ((group.per_domain - 1) * protocol.link_hop + std::log2(domains) * protocol.tree_hop);
    best = std::min(best, kMicro * (protocol.tree_base + hops) + 2 * bytes / (rate * kTreeShare));
  }
  if (group.in_switch && group.per_domain == group.ranks && group.ranks > 2)
    best = std::min(best, kMicro * kSwitchBase + bytes * (group.ranks + 1) / group.ranks / (group.link / kLinkShare * kSwitchShare));
  return best;
}

double all_to_all_time(double bytes, const Group& group) {
  if (group.ranks <= 1 || bytes <= 0) return 0;
  const double inside = bytes * (group.per_domain - 1) / group.ranks / group.link;
  const double outside = bytes * (group.ranks - group.per_domain) / group.ranks / (group.network / group.per_domain);
  const double hops = std::ceil(group.domains()) > 1 ? 14.0 : 3.4;
  return std::max(inside, group.ranks > group.per_domain ? outside : 0.0) + kMicro * (8.4 + hops + 0.3 * group.ranks);
}

double send_time(double bytes, const Group& group, bool across) {
  const double rate = across ? group.network / group.per_domain : group.link;
  return kMicro * (across ? kPeerHop : 6.0) + bytes / rate;
}

}  // namespace weft::cost
