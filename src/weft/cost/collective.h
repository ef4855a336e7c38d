// Time of collectives over a group whose members sit in nodes.
#pragma once

#include <cstdint>

#include "weft/cost/tuning.h"
#include "weft/machine/machine.h"

namespace weft::cost {

/// Bytes that every rank sends, over the size of the whole tensor (nccl-tests' bus bandwidth factors).
double all_reduce_factor(double ranks);  ///< 2 (n-1) / n
double all_gather_factor(double ranks);  ///< (n-1) / n; also reduce-scatter and all-to-all

/// Alpha-beta times of the textbook algorithms; alpha in seconds per hop, beta in B/s, bytes of the whole tensor.
double ring_all_gather_time(double bytes, double ranks, double alpha, double beta);
double ring_all_reduce_time(double bytes, double ranks, double alpha, double beta);
double tree_all_reduce_time(double bytes, double ranks, double alpha, double beta);

/// How a group of `ranks` sits in the machine.
struct Group {
  double ranks = 1;
  double per_domain = 1;  ///< members that reach each other over links
  double link = 0;        ///< B/s between members of one domain, as collectives reach it
  double network = 0;     ///< B/s that all members of one domain together get towards other domains
  bool in_switch = false; ///< the switch can reduce (Hopper and later)

  double domains() const { return ranks / per_domain; }
};

/// The group of an axis: `ranks` members, `stride` world ranks apart.
Group group_of(const machine::Machine& machine, int64_t ranks, int64_t stride, const Tuning& tuning);

/// Channels that NCCL runs, a multiprocessor each: collectives over links and network; messages between two ranks.
constexpr double kCollectiveChannels = 24, kSendChannels = 4;
/// Compute lost per second of communication that overlaps it.
double slowdown_of(double channels, const machine::Machine& machine);

/// Seconds, with the best protocol and algorithm for the size. bytes: whole tensor.
double all_gather_time(double bytes, const Group& group);  ///< also reduce-scatter
double all_reduce_time(double bytes, const Group& group);
/// bytes: what one rank holds before the exchange.
double all_to_all_time(double bytes, const Group& group);
/// One message between neighbours of the axis. `across`: through the network.
double send_time(double bytes, const Group& group, bool across);

}  // namespace weft::cost
