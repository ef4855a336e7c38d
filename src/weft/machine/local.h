// The computer that runs this program, as the kernel describes it; nothing is measured (weft bench calibrate does that).
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "weft/machine/machine.h"

namespace weft::machine {

struct LocalComputer {
  std::string cpu;                ///< the processor's name
  int64_t cores = 1;              ///< that this process may use
  int64_t numa_nodes = 1;
  double memory_gib = 0;          ///< of the machine, or what its control group allows
  std::vector<std::string> gpus;  ///< names as the driver says them, one per device
};

/// `root`: where /proc and /sys are found (tests).
LocalComputer detect_local(const std::filesystem::path& root = "/");

/// Its accelerators when it has some that the table knows; else its processor as one device, with rates from the number of
/// cores and the widest vector instructions that `flags` (of /proc/cpuinfo) names, a guess to be replaced by a calibration.
/// Throws ConfigError for accelerators of several kinds.
Machine machine_of(const LocalComputer& computer);

/// Table name of a device that the driver calls `driver_name` ("NVIDIA H100 80GB HBM3"); empty when there is none.
std::string table_name(const std::string& driver_name);

}  // namespace weft::machine
