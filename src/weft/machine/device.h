// Accelerators as data: what the data sheets and public measurements say, each row with its source.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft::machine {

enum class Precision { fp32, fp16, bf16, fp8, fp4 };

/// One accelerator. Rates are per device; 0 = not published.
struct Device {
  std::string name;
  double memory_gib = 0;          ///< usable by a process, as the driver reports it
  double memory_tbps = 0;         ///< 1e12 B/s
  double bf16_tflops = 0;         ///< dense peak (fp16 on V100)
  double fp8_tflops = 0;
  double fp4_tflops = 0;
  double link_gbps = 0;           ///< NVLink / xGMI / ICI, GB/s per direction
  double nic_gbits = 0;           ///< Gbit/s per device towards other nodes
  double host_gbps = 0;           ///< PCIe or C2C, GB/s per direction
  double matmul_bf16_tflops = 0;  ///< largest matrix product measured by the public benchmark named in `source`
  double matmul_fp8_tflops = 0;
  double l2_mb = 0;
  int64_t multiprocessors = 1;
  int64_t node_devices = 1;       ///< devices of the usual node
  int64_t link_domain = 1;        ///< devices that reach each other over `link_gbps`
  int generation = 0;             ///< 7 Volta, 8 Ampere, 9 Hopper, 10 Blackwell; 0 other makers
  std::string source;
  double matmul_fp32_tflops = 0;  ///< largest product in fp32; 0: half the 16-bit rate (TF32)
  double operation_us = 0;        ///< start to end of one small operation where it was measured; 0: the model's gap and host
  double training_share_fp32 = 1;  ///< of a calibrated device: what a whole training step in fp32 reached of its rates
  double training_share_bf16 = 1;  ///< the same in bf16
  bool calibrated = false;        ///< rates are what this machine's own programs reach, not a benchmark's best
};

/// The shipped table.
const std::vector<Device>& devices();

/// Finds a device by name: exact, then alias, then the longest table name that `name` starts with (and the reverse).
/// Throws ConfigError with the nearest names: an unknown device is an error, never a default.
const Device& find_device(const std::string& name);

/// "bf16", "fp8", ... to Precision; throws ConfigError with the list. Empty text is bf16.
Precision parse_precision(const std::string& text);
const char* precision_name(Precision precision);

/// Dense peak of the matrix units, TFLOP/s. fp8 on devices without it is the bf16 rate.
double peak_tflops(const Device& device, Precision precision);

/// Rate of the largest matrix products in practice, TFLOP/s: measured where the table has it, else the usual share of peak.
double matmul_tflops(const Device& device, Precision precision);

}  // namespace weft::machine
