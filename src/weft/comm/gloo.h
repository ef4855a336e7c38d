// Makes gloo groups. The only file pair that knows c10d::ProcessGroupGloo.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>

namespace weft::detail {

/// Network devices (sockets and their thread) that the groups of one world share.
class GlooDevices {
 public:
  /// `one_host`: the loopback device, unless GLOO_SOCKET_IFNAME names interfaces; else the one that the host name resolves to.
  explicit GlooDevices(bool one_host);
  ~GlooDevices();

  /// Collective over the group: connects all pairs through `store`. abort() on the result ends its calls in flight, from any
  /// thread; later calls of it do nothing.
  c10::intrusive_ptr<c10d::Backend> make_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                               std::chrono::milliseconds connect_timeout);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Gloo completes messages inside wait() only. This work of the same message can be polled too: the first isCompleted() starts
/// a thread that waits. `backend` stays alive until the message has ended.
c10::intrusive_ptr<c10d::Work> pollable_message(c10::intrusive_ptr<c10d::Backend> backend,
                                                c10::intrusive_ptr<c10d::Work> message);

bool is_gloo(const c10d::Backend& backend);

}  // namespace weft::detail
