// Machine files: what calibration writes reads back, and every mistake is found.
#include <gtest/gtest.h>

#include "weft/config/machine_file.h"
#include "weft/core/error.h"

namespace weft::config {
namespace {

MachineFile sample() {
  MachineFile file;
  file.name = "Test \"CPU\" (2 ranks)";
  file.devices = 2, file.cores = 4, file.memory_gib = 12, file.memory_gbps = 9.5;
  file.matmul_fp32_gflops = 150, file.matmul_bf16_gflops = 80, file.link_gbps = 3.25, file.operation_us = 1.5;
  return file;
}

TEST(MachineFile, ReadsBackWhatItWrites) {
  const MachineFile file = parse_machine(to_toml(sample()), "machine.toml");
  EXPECT_EQ(file.name, sample().name);
  EXPECT_EQ(file.devices, 2);
  EXPECT_EQ(file.link_gbps, 3.25);
  const machine::Machine machine = machine_of(file);
  EXPECT_EQ(machine.node_devices, 2);
  EXPECT_TRUE(machine.device.calibrated);
  EXPECT_DOUBLE_EQ(machine::matmul_tflops(machine.device, machine::Precision::fp32), 0.15);
  EXPECT_DOUBLE_EQ(machine::matmul_tflops(machine.device, machine::Precision::bf16), 0.08);
}

TEST(MachineFile, EveryMistakeAtOnce) {
  std::string text = to_toml(sample());
  text.replace(text.find("memory_gbps ="), 11, "memory_gbp");
  text.replace(text.find("cores = 4"), 9, "cores = 0");
  try {
    parse_machine(text, "machine.toml");
    FAIL();
  } catch (const ConfigError& error) {
    const std::string what = error.what();
    for (const char* part : {"did you mean memory_gbps?", "memory_gbps: is missing", "1 <= cores"}) EXPECT_NE(what.find(part), std::string::npos) << part << "\n" << what;
  }
  EXPECT_THROW(parse_machine("x = 1", "machine.toml"), ConfigError);
  EXPECT_THROW(parse_machine("[machine", "machine.toml"), ConfigError);
  EXPECT_THROW(read_machine("/nonexistent.toml"), ConfigError);
}

}  // namespace
}  // namespace weft::config
