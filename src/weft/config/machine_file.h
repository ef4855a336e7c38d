// A measured machine as a TOML file: what `weft bench calibrate` writes and --machine FILE.toml reads.
#pragma once

#include <string>

#include "weft/machine/machine.h"

namespace weft::config {

/// Rates of one device of a machine. On a machine of CPUs a device is one rank with its threads, measured while all ranks work.
struct MachineFile {
  std::string name;
  int64_t devices = 1;            ///< on one node
  int64_t cores = 1;              ///< of one device
  double memory_gib = 0;          ///< of one device
  double memory_gbps = 0;         ///< bytes read and written by a large copy, per second
  double matmul_fp32_gflops = 0;
  double matmul_bf16_gflops = 0;  ///< 0: not measured
  double link_gbps = 0;           ///< bus bandwidth of a large all-reduce inside the node; 0: one device
  double operation_us = 0;        ///< one small operation, start to end
  double training_share_fp32 = 1;  ///< what a whole training step in fp32 reached of the step that the rates above promise
  double training_share_bf16 = 1;  ///< the same in bf16
  double nic_gbits = 10;          ///< not measured
};

std::string to_toml(const MachineFile& file);

/// Every problem of the text at once as ConfigError: unknown and missing keys, types, numbers that no machine has.
MachineFile parse_machine(const std::string& text, const std::string& name);

machine::Machine machine_of(const MachineFile& file);

/// ConfigError when the file cannot be read.
machine::Machine read_machine(const std::string& path);

}  // namespace weft::config
