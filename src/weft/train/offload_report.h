// What offloading cost a run, beside what the planner's formula says.
#pragma once

#include <string>

#include "weft/optim/offload_options.h"

namespace weft::train {

/// Of one update of this rank.
struct OffloadCost {
  double bytes = 0;     ///< read from and written to the disk
  double step_s = 0;    ///< of the whole update
  double waited_s = 0;  ///< of it, standing still for the disk
};

struct OffloadReport {
  int64_t file_bytes = 0, buffer_bytes = 0;
  OffloadCost predicted;  ///< cost/offload.h, with the disk's rates as measured at the start and the memory bandwidth of the machine
  OffloadCost measured;   ///< mean over all updates
};

OffloadReport report_offload(const optim::OffloadUse& use);

/// Two lines.
std::string to_text(const OffloadReport& report);
/// A JSON object.
std::string to_json(const OffloadReport& report);

}  // namespace weft::train
