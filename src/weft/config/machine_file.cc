#include "weft/config/machine_file.h"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <sstream>
#include <variant>
#include <vector>

#include "weft/core/error.h"
#include "weft/core/json.h"
#include "weft/core/nearest.h"

namespace weft::config {
namespace {

using Slot = std::variant<std::string MachineFile::*, int64_t MachineFile::*, double MachineFile::*>;

struct Key {
  const char* name;
  Slot slot;
  bool required;
  double least;
  const char* meaning;
};

const std::vector<Key>& keys() {
  static const std::vector<Key> kKeys = {
      {"name", &MachineFile::name, true, 0, "how tables call it"},
      {"devices", &MachineFile::devices, true, 1, "devices of one node (on CPUs: ranks)"},
      {"cores", &MachineFile::cores, true, 1, "multiprocessors or cores of one device"},
      {"memory_gib", &MachineFile::memory_gib, true, 1e-3, "memory of one device"},
      {"memory_gbps", &MachineFile::memory_gbps, true, 1e-3, "GB/s that a large copy reads and writes"},
      {"matmul_fp32_gflops", &MachineFile::matmul_fp32_gflops, true, 1e-3, "large products in fp32"},
      {"matmul_bf16_gflops", &MachineFile::matmul_bf16_gflops, false, 0, "large products in bf16; 0: not measured"},
      {"link_gbps", &MachineFile::link_gbps, false, 0, "bus bandwidth of a large all-reduce inside the node; 0: one device"},
      {"operation_us", &MachineFile::operation_us, false, 0, "one small operation, start to end"},
      {"training_share_fp32", &MachineFile::training_share_fp32, false, 1e-3, "what a whole training step in fp32 reached of what these rates promise"},
      {"training_share_bf16", &MachineFile::training_share_bf16, false, 1e-3, "the same in bf16"},
      {"nic_gbits", &MachineFile::nic_gbits, false, 0, "network of one device towards other nodes; not measured"}};
  return kKeys;
}

std::string value_text(const MachineFile& file, const Slot& slot) {
  return std::visit(
      [&](auto member) {
        std::ostringstream out;
        out << toml::value(file.*member);
        return out.str();
      },
      slot);
}

/// Stores a node; a problem in words, or nothing.
std::string store(MachineFile& file, const Key& key, const toml::node& node) {
  return std::visit(
      [&](auto member) -> std::string {
        using Type = std::remove_reference_t<decltype(file.*member)>;
        const auto value = node.value<Type>();
        if (!value || (std::is_same_v<Type, std::string> != node.is_string())) return std::is_same_v<Type, std::string> ? "is no text" : "is no number";
        file.*member = *value;
        if constexpr (!std::is_same_v<Type, std::string>) {
          constexpr double kMost = 1e9;
          const double number = static_cast<double>(*value);
          if (!(number >= key.least) || number > kMost) return fmt::format("{}; the rule is {:g} <= {} <= {:g}", number, key.least, key.name, kMost);
        }
        return "";
      },
      key.slot);
}

}  // namespace

std::string to_toml(const MachineFile& file) {
  std::string out = "[machine]\n";
  for (const Key& key : keys()) out += fmt::format("# {}\n{} = {}\n", key.meaning, key.name, value_text(file, key.slot));
  return out;
}

MachineFile parse_machine(const std::string& text, const std::string& name) {
  MachineFile file;
  Findings findings;
  toml::table table;
  try {
    table = toml::parse(text);
  } catch (const toml::parse_error& error) {
    throw ConfigError(fmt::format("{}:{}: {}", name, error.source().begin.line, error.description()));
  }
  const toml::table* machine = table["machine"].as_table();
  if (machine == nullptr) throw ConfigError(name + " has no section [machine]; weft bench calibrate --out FILE writes one");
  for (const auto& [found, node] : *machine) {
    const std::string text_key(found.str());
    const Key* known = nullptr;
    std::vector<std::string> names;
    for (const Key& key : keys()) {
      names.push_back(key.name);
      if (text_key == key.name) known = &key;
    }
    const std::string where = fmt::format("{}:{} {}", name, node.source().begin.line, text_key);
    if (known == nullptr) findings.add(where, "unknown key", fmt::format("did you mean {}?", nearest(text_key, names).front()));
    else if (const std::string problem = store(file, *known, node); !problem.empty()) findings.add(where, problem);
  }
  for (const Key& key : keys())
    if (key.required && !machine->contains(key.name)) findings.add(name + " " + key.name, "is missing", key.meaning);
  findings.throw_if_any(name);
  return file;
}

machine::Machine machine_of(const MachineFile& file) {
  machine::Machine machine;
  machine::Device& device = machine.device;
  device = machine::Device{};
  device.name = file.name;
  device.source = "weft bench calibrate";
  device.memory_gib = file.memory_gib;
  device.memory_tbps = file.memory_gbps / 1e3;
  device.matmul_fp32_tflops = file.matmul_fp32_gflops / 1e3;
  device.matmul_bf16_tflops = device.bf16_tflops = (file.matmul_bf16_gflops > 0 ? file.matmul_bf16_gflops : file.matmul_fp32_gflops) / 1e3;
  device.link_gbps = file.link_gbps;
  device.host_gbps = file.memory_gbps;
  device.multiprocessors = file.cores;
  device.node_devices = device.link_domain = file.devices;
  device.nic_gbits = file.nic_gbits;
  device.operation_us = file.operation_us;
  device.training_share_fp32 = file.training_share_fp32;
  device.training_share_bf16 = file.training_share_bf16;
  device.calibrated = true;
  machine.node_devices = machine.link_domain = file.devices;
  machine.nic_gbits = file.nic_gbits;
  return machine;
}

machine::Machine read_machine(const std::string& path) { return machine_of(parse_machine(read_text(path), path)); }

}  // namespace weft::config
