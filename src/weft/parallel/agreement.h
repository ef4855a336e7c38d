// What the ranks have to agree on: at construction, what is wrapped; after each step, whether it counts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "weft/parallel/data_parallel.h"

namespace weft::parallel {

/// Throws the same ConfigError on every rank if a rank has tensors that cannot be wrapped (undefined, sparse, not a leaf, two
/// of one name, two that share memory) or options that cannot be had (every finding is named), or if options that the ranks
/// must share, or names, order, shapes, dtypes or trainability differ between the ranks (the first difference is named).
/// Collective.
void check_same_model(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers,
                      const DataParallelOptions& options, const Comm& comm);

/// Messages for what both engines refuse, of parameter `name`.
std::string moved_text(const std::string& name);
std::string sparse_text(const std::string& name);

/// Why this rank's part of a step does not count.
struct StepFault {
  enum class Kind {
    none,
    threw,  ///< backward ended with an exception, which the rank has seen
    rule    ///< the program did what it must not, as `text` says
  };
  Kind kind = Kind::none;
  std::string text;  ///< with names and remedy; of `threw` it may be empty
  explicit operator bool() const { return kind != Kind::none; }
};

/// The first parameter whose requires_grad is not what it was when it was wrapped, as a message; empty if there is none.
std::string find_refrozen(const std::vector<NamedTensor>& trainable, const std::vector<NamedTensor>& frozen);

/// Collective, after a vote in which some rank had a fault. Throws on every rank whose own is not `threw`: the ConfigError of
/// the first rank that broke a rule, else a CommError that names the ranks whose backward threw.
void throw_step_fault(const StepFault& mine, uint64_t round, const Comm& comm);

}  // namespace weft::parallel
