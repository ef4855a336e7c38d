#include "weft/comm/gloo.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstdlib>

#include "weft/comm/state.h"

namespace weft::detail {
namespace {

using Gloo = c10d::ProcessGroupGloo;

class AbortableGloo final : public Gloo {
 public:
  using Gloo::Gloo;
  // Calls in flight fail at once; without it the destructor waits for them until their deadlines.
  void abort() override {
    for (auto& context : contexts_) context->closeConnections();
  }
};

}  // namespace

struct GlooDevices::Impl {
  std::vector<std::shared_ptr<gloo::transport::Device>> devices;
};

GlooDevices::GlooDevices(bool one_host) : impl_(std::make_unique<Impl>()) {
  const char* interfaces = std::getenv("GLOO_SOCKET_IFNAME");
  if (one_host && !(interfaces && *interfaces)) {
    impl_->devices.push_back(Gloo::createDeviceForHostname("127.0.0.1"));
  } else {
    impl_->devices = Gloo::Options::create_default()->devices;
  }
}

GlooDevices::~GlooDevices() = default;

c10::intrusive_ptr<c10d::Backend> GlooDevices::make_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                          std::chrono::milliseconds connect_timeout) {
  auto options = Gloo::Options::create(connect_timeout);
  options->devices = impl_->devices;
  auto group = c10::make_intrusive<AbortableGloo>(store, rank, size, options);
  group->setTimeout(kBackgroundTimeout);
  return group;
}

bool is_gloo(const c10d::Backend& backend) { return dynamic_cast<const Gloo*>(&backend) != nullptr; }

}  // namespace weft::detail
