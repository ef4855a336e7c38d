#include "weft/machine/local.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>

#include "weft/core/error.h"
#include "weft/core/system.h"

namespace weft::machine {
namespace {

namespace fs = std::filesystem;
constexpr double kGiB = 1024.0 * 1024 * 1024;

int64_t count_numa_nodes(const fs::path& root) {
  int64_t nodes = 0;
  while (fs::exists(root / fmt::format("sys/devices/system/node/node{}", nodes))) ++nodes;
  return std::max<int64_t>(1, nodes);
}

double memory_of(const fs::path& root) {
  const std::string total = value_behind(root / "proc/meminfo", "MemTotal");
  double bytes = total.empty() ? 0 : std::stod(total) * 1024, limit = 0;
  std::ifstream group(root / "sys/fs/cgroup/memory.max");  // "max" when there is no limit
  if (group >> limit && limit < bytes) bytes = limit;
  return bytes / kGiB;
}

/// NVIDIA's driver keeps a folder per device.
std::vector<std::string> gpu_names(const fs::path& root) {
  std::vector<std::string> names;
  const fs::path folder = root / "proc/driver/nvidia/gpus";
  if (!fs::is_directory(folder)) return names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(value_behind(entry.path() / "information", "Model"));
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

LocalComputer detect_local(const fs::path& root) {
  LocalComputer computer;
  computer.cpu = value_behind(root / "proc/cpuinfo", "model name");
  computer.cores = usable_cores();
  computer.numa_nodes = count_numa_nodes(root);
  computer.memory_gib = memory_of(root);
  computer.gpus = gpu_names(root);
  return computer;
}

std::string table_name(const std::string& driver_name) {
  // Longest first: "H100 80GB HBM3" is the SXM part, "H100 PCIe" the card.
  constexpr std::pair<const char*, const char*> kNames[] = {
      {"A100-SXM4-80GB", "A100-80GB-SXM"}, {"A100-SXM4-40GB", "A100-40GB-SXM"}, {"A100 80GB PCIe", "A100-80GB-PCIe"}, {"A800", "A800-80GB"},
      {"H100 PCIe", "H100-80GB-PCIe"},     {"H100", "H100-80GB-SXM"},           {"H800", "H800-SXM"},                {"H200", "H200-SXM"},
      {"GH200", "GH200-96GB"},             {"GB200", "GB200"},                  {"GB300", "GB300"},                  {"B200", "B200-SXM"},
      {"B300", "B300-SXM"},                {"V100-SXM2-32GB", "V100-32GB-SXM2"}, {"V100-SXM2-16GB", "V100-16GB-SXM2"}, {"L40S", "L40S"},
      {"RTX 4090", "RTX 4090"}};
  std::string found;
  size_t longest = 0;
  for (const auto& [part, name] : kNames)
    if (driver_name.find(part) != std::string::npos && std::string(part).size() > longest) found = name, longest = std::string(part).size();
  return found;
}

Machine machine_of(const LocalComputer& computer) {
  if (!computer.gpus.empty()) {
    const std::string& first = computer.gpus.front();
    for (const std::string& gpu : computer.gpus)
      if (gpu != first) throw ConfigError(fmt::format("this machine has accelerators of several kinds ({} and {}); name one with --machine", first, gpu));
    const std::string name = table_name(first);
    if (name.empty()) throw ConfigError(fmt::format("this machine's accelerator \"{}\" is not in the table; name a similar one with --machine, or measure with weft bench calibrate", first));
    Machine machine = Machine::of(name);
    machine.node_devices = static_cast<int64_t>(computer.gpus.size());
    if (machine.device.link_domain > 1 && machine.device.link_domain <= machine.device.node_devices) machine.link_domain = machine.node_devices;
    return machine;
  }
  Machine machine;
  Device& device = machine.device;
  device = Device{};
  device.name = computer.cpu.empty() ? "CPU" : computer.cpu;
  device.memory_gib = computer.memory_gib;
  // Two fused multiply-adds of eight floats a cycle at 2.5 GHz, 4 GB/s of memory a core: what servers since 2017 have at least.
  const double cores = static_cast<double>(computer.cores);
  device.bf16_tflops = device.matmul_fp32_tflops = cores * 2 * 8 * 2 * 2.5e9 / 1e12;
  device.memory_tbps = cores * 4e9 / 1e12;
  device.host_gbps = cores * 4;
  device.multiprocessors = computer.cores;
  device.node_devices = device.link_domain = 1;
  device.source = "guessed from the number of cores; weft bench calibrate measures";
  machine.node_devices = machine.link_domain = 1;
  machine.nic_gbits = 10;
  return machine;
}

}  // namespace weft::machine
