// Detection of the local machine, from files as the kernel and the driver write them.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "weft/core/error.h"
#include "weft/machine/local.h"

namespace weft::machine {
namespace {

namespace fs = std::filesystem;

/// A root folder with a processor, memory, two NUMA nodes and as many accelerators as there are names.
fs::path make_root(const std::string& name, const std::vector<std::string>& gpus) {
  const fs::path root = fs::path(testing::TempDir()) / ("weft_local_" + name);
  fs::remove_all(root);
  for (const char* folder : {"proc", "sys/fs/cgroup", "sys/devices/system/node/node0", "sys/devices/system/node/node1"}) fs::create_directories(root / folder);
  std::ofstream(root / "proc/cpuinfo") << "processor\t: 0\nmodel name\t: Test CPU 9000\n";
  std::ofstream(root / "proc/meminfo") << "MemTotal:       67108864 kB\nMemFree: 1 kB\n";
  std::ofstream(root / "sys/fs/cgroup/memory.max") << "max\n";
  for (size_t i = 0; i < gpus.size(); ++i) {
    const fs::path folder = root / "proc/driver/nvidia/gpus" / std::to_string(i);
    fs::create_directories(folder);
    std::ofstream(folder / "information") << "Model: \t\t " << gpus[i] << "\nIRQ: 1\n";
  }
  return root;
}

TEST(Local, ReadsProcessorMemoryAndNodes) {
  const LocalComputer computer = detect_local(make_root("cpu", {}));
  EXPECT_EQ(computer.cpu, "Test CPU 9000");
  EXPECT_EQ(computer.numa_nodes, 2);
  EXPECT_DOUBLE_EQ(computer.memory_gib, 64);
  EXPECT_GE(computer.cores, 1);
  const Machine machine = machine_of(computer);
  EXPECT_EQ(machine.device.name, "Test CPU 9000");
  EXPECT_EQ(machine.device.multiprocessors, computer.cores);
  EXPECT_GT(matmul_tflops(machine.device, Precision::fp32), 0);
}

TEST(Local, AControlGroupLimitsMemory) {
  const fs::path root = make_root("limit", {});
  std::ofstream(root / "sys/fs/cgroup/memory.max") << (8ll << 30) << "\n";
  EXPECT_DOUBLE_EQ(detect_local(root).memory_gib, 8);
}

TEST(Local, AcceleratorsComeFromTheTable) {
  const Machine machine = machine_of(detect_local(make_root("h100", {"NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"})));
  EXPECT_EQ(machine.device.name, "H100-80GB-SXM");
  EXPECT_EQ(machine.node_devices, 2);
  EXPECT_EQ(machine.link_domain, 2);
  EXPECT_EQ(table_name("NVIDIA A100-SXM4-40GB"), "A100-40GB-SXM");
  EXPECT_EQ(table_name("NVIDIA H100 PCIe"), "H100-80GB-PCIe");
  EXPECT_EQ(table_name("NVIDIA GB200"), "GB200");
  EXPECT_EQ(table_name("Imaginary 1"), "");
}

TEST(Local, StrangersAndMixturesAreErrorsThatNameThem) {
  const auto message = [](const std::vector<std::string>& gpus) {
    try {
      machine_of(detect_local(make_root("odd", gpus)));
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(message({"Imaginary 1"}).find("Imaginary 1"), std::string::npos);
  EXPECT_NE(message({"NVIDIA H100 PCIe", "NVIDIA H200"}).find("several kinds"), std::string::npos);
}

}  // namespace
}  // namespace weft::machine
