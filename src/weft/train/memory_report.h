// Memory of a run: what every rank held, and what to do when it was too much.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "weft/comm/comm.h"
#include "weft/core/cause.h"
#include "weft/memory/cpu_allocator.h"
#include "weft/train/job.h"

namespace weft::train {

/// The accounts of all ranks, the same on each; empty when this rank does not count. Collective.
std::vector<memory::Usage> usage_of_ranks(const Comm& comm);

/// What tensors held at the peak: a line for each rank, or the rank with the highest peak alone. Empty for no ranks.
std::string memory_table(const std::vector<memory::Usage>& ranks, bool every_rank);

/// The change of configuration that would free most of `usage`, with the bytes it frees; of equal ones that which keeps
/// the run's losses.
std::string largest_lever(const Job& job, const memory::Usage& usage);

/// Throws the ConfigError that ends a run for which there was no memory.
[[noreturn]] void throw_out_of_memory(const Job& job, int rank, const std::string& what, const memory::Usage& usage);

/// Runs fn; a lack of memory becomes a ConfigError with the table and the largest lever.
template <class Fn>
auto explain_out_of_memory(const Job& job, int rank, Fn&& fn) {
  try {
    return fn();
  } catch (const memory::OutOfMemory& error) {
    memory::Usage wanted = error.usage;
    wanted.live_of[static_cast<size_t>(error.category)] += error.asked;
    throw_out_of_memory(job, rank, error.what_without_backtrace(), wanted);
  } catch (const std::exception& error) {
    if (!memory::is_lack_of_memory(error)) throw;
    throw_out_of_memory(job, rank, "out of memory: the system has none left (" + cause_text(error.what()) + ")", memory::usage());
  }
}

}  // namespace weft::train
