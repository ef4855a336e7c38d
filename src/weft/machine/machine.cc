#include "weft/machine/machine.h"

namespace weft::machine {
namespace {

/// Memory of the usual node's host, GiB, from the makers' system descriptions: DGX-1 512, DGX A100 and H100 2,048, DGX B200
/// 4,096; Grace carries 480 per chip (GB200: two chips for four devices), 120 in the GH200 of large systems; Frontier's nodes 512.
/// Others: twice the devices' memory, what such servers are sold with.
double usual_host_memory(const Device& device) {
  const auto named = [&](const char* part) { return device.name.find(part) != std::string::npos; };
  if (named("GH200")) return 4 * 120;
  if (named("GB200") || named("GB300")) return 2 * 480;
  if (named("MI250X")) return 512;
  if (named("TPU") || named("Trainium")) return 512;
  if (device.generation == 7) return 512;
  if (device.link_domain < 8) return 2 * device.memory_gib * static_cast<double>(device.node_devices);
  return device.generation >= 10 ? 4096 : 2048;
}

}  // namespace

Machine Machine::of(const std::string& device_name) {
  Machine machine;
  machine.device = find_device(device_name);
  machine.node_devices = machine.device.node_devices;
  machine.link_domain = machine.device.link_domain;
  machine.nic_gbits = machine.device.nic_gbits;
  machine.host_memory_gib = usual_host_memory(machine.device);
  return machine;
}

}  // namespace weft::machine
