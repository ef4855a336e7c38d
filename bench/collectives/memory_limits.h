// What the machine's memory allows, whatever a communication library does: the bar for bench_collectives.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace weft::bench {

/// Bus bandwidth in GB/s of `operation` on `bytes` bytes with `ranks` ranks if it cost nothing but its loads and stores: threads,
/// each on a core of its own, copy and add in one shared address space, with one barrier before and one after. Definition of
/// bytes as in bench_collectives. Empty with more ranks than cores, or for barrier-like calls.
std::optional<double> bus_limit(const std::string& operation, int64_t bytes, int ranks);

/// Nanoseconds for a cache line to go from one core to another. Empty on one core.
std::optional<double> line_hop_ns();

/// nccl-tests' factors (its PERFORMANCE.md): busbw = bytes / time x factor.
double bus_factor(const std::string& operation, int ranks);

}  // namespace weft::bench
