// Where an optimizer's state is kept, and what that costs.
#pragma once

#include <cstdint>
#include <string>

#include "weft/memory/scratch_file.h"

namespace weft::optim {

/// As DeepSpeed's "offload_optimizer".
struct OffloadOptions {
  enum class To {
    cpu,  ///< host memory, where the update is made, too. For parameters on the CPU nothing changes
    nvme  ///< a file, streamed through buffers around the update
  };
  To to = To::nvme;
  std::string dir;                           ///< of the file, on a local disk
  int64_t buffer_bytes = int64_t{16} << 20;  ///< of state that is read, updated and written at a time, at most
  int64_t buffers = 4;                       ///< at least 3: one is updated, one written, the others are read ahead
  std::string what = "an optimizer's state"; ///< for messages
};

/// What state in a file has cost so far, on this rank.
struct OffloadUse {
  int64_t steps = 0;
  int64_t file_bytes = 0;     ///< of the state
  int64_t buffer_bytes = 0;   ///< of memory through which it passes
  int64_t touched_bytes = 0;  ///< of weights, gradients and state that one update reads or writes in memory
  double step_s = 0;          ///< of all updates, with what they waited for
  memory::ScratchUse disk;
  memory::ScratchRates rates; ///< of the disk, measured when the file was made
};

}  // namespace weft::optim
