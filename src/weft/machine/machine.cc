#include "weft/machine/machine.h"

namespace weft::machine {

Machine Machine::of(const std::string& device_name) {
  Machine machine;
  machine.device = find_device(device_name);
  machine.node_devices = machine.device.node_devices;
  machine.link_domain = machine.device.link_domain;
  machine.nic_gbits = machine.device.nic_gbits;
  return machine;
}

}  // namespace weft::machine
