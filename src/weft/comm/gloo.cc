#include "weft/comm/gloo.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>

#include "weft/comm/pipe_signal.h"
#include "weft/comm/state.h"

namespace weft::detail {
namespace {

using Gloo = c10d::ProcessGroupGloo;

class AbortableGloo final : public Gloo {
 public:
  using Gloo::Gloo;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int peer, int tag) override {
    const PipeSignalBlocked here;  // a message is written by the caller's thread
    return Gloo::send(tensors, peer, tag);
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer, int tag) override {
    const PipeSignalBlocked here;
    return Gloo::recv(tensors, peer, tag);
  }
  // Calls in flight fail at once; without it the destructor waits for them until their deadlines. Closing connections is
  // not enough: gloo tells the peers, but not its own pending calls. A receive that expires does tell them.
  void abort() override {
    if (aborted_.exchange(true)) return;
    const PipeSignalBlocked here;
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
  std::atomic<bool> aborted_{false};
};

class PollableMessage final : public c10d::Work {
 public:
  PollableMessage(c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Work> message)
      : state_(std::make_shared<State>()) {
    state_->backend = std::move(backend);
    state_->message = std::move(message);
  }

  bool isCompleted() override {
    if (!polled_) {
      polled_ = true;
      std::thread([state = state_] { state->run(); }).detach();
    }
    std::lock_guard lock(state_->mutex);
    return state_->ended;
  }

  bool wait(std::chrono::milliseconds timeout) override {
    if (!polled_) return state_->message->wait(timeout);
    std::unique_lock lock(state_->mutex);
    if (!state_->changed.wait_for(lock, timeout, [&] { return state_->ended; })) {
      throw std::runtime_error("the message did not complete in time");
    }
    if (state_->error) std::rethrow_exception(state_->error);
    return true;
  }

 private:
  struct State {
    c10::intrusive_ptr<c10d::Backend> backend;
    c10::intrusive_ptr<c10d::Work> message;
    std::mutex mutex;
    std::condition_variable changed;
    bool ended = false;
    std::exception_ptr error;

    void run() {
      std::exception_ptr thrown;
      try {
        message->wait(kBackgroundTimeout);
      } catch (...) {
        thrown = std::current_exception();
      }
      std::lock_guard lock(mutex);
      ended = true;
      error = thrown;
      changed.notify_all();
    }
  };
  std::shared_ptr<State> state_;
  bool polled_ = false;
};

}  // namespace

struct GlooDevices::Impl {
  std::vector<std::shared_ptr<gloo::transport::Device>> devices;
};

GlooDevices::GlooDevices(bool one_host) : impl_(std::make_unique<Impl>()) {
  const PipeSignalBlocked for_its_threads;
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
  const PipeSignalBlocked for_its_threads;
  auto group = c10::make_intrusive<AbortableGloo>(store, rank, size, options);
  group->setTimeout(kBackgroundTimeout);
  return group;
}

c10::intrusive_ptr<c10d::Work> pollable_message(c10::intrusive_ptr<c10d::Backend> backend,
                                                c10::intrusive_ptr<c10d::Work> message) {
  return c10::make_intrusive<PollableMessage>(std::move(backend), std::move(message));
}

bool is_gloo(const c10d::Backend& backend) { return dynamic_cast<const Gloo*>(&backend) != nullptr; }

}  // namespace weft::detail
