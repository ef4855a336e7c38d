#include "weft/comm/gloo.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstdlib>

#include "weft/comm/state.h"

namespace weft::detail {
namespace {

using Gloo = c10d::ProcessGroupGloo;

class AbortableGloo final : public Gloo {
 public:
  using Gloo::Gloo;
  // Calls in flight fail at once; without it the destructor waits for them until their deadlines. Closing connections is
  // not enough: gloo tells the peers, but not its own pending calls. A receive that expires does tell them.
  void abort() override {
    at::Tensor nothing = at::empty({1}, at::kByte);
    std::vector<at::Tensor> target{nothing};
    for (int peer = 0; peer < getSize(); ++peer) {
      if (peer == getRank()) continue;
      try {
        recv(target, peer, kAbortTag)->wait(std::chrono::milliseconds(1));
      } catch (const std::exception&) {
        // Expected: that is the signal.
      }
    }
    for (auto& context : contexts_) context->closeConnections();
  }

 private:
  static constexpr int kAbortTag = 0x57454654;  // never sent to
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
