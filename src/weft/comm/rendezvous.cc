#include "weft/comm/rendezvous.h"

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <map>
#include <mutex>
#include <string>

#include "weft/core/error.h"

namespace weft::detail {

JobStore job_store(const launch::RankEnvironment& env, std::chrono::milliseconds timeout) {
  static std::mutex mutex;
  // Never destroyed: see the header, and the order in which static objects go would be left to chance.
  static auto& stores = *new std::map<std::string, c10::intrusive_ptr<c10d::Store>>();
  std::lock_guard lock(mutex);
  const std::string where = fmt::format("{}:{}", env.master_addr, env.master_port);
  const bool serve = env.rank == 0 && !env.agent_store;
  auto& store = stores[where];
  if (!store) {
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(env.master_port);
    options.isServer = serve;
    options.waitWorkers = false;
    options.timeout = timeout;
    if (serve && env.listen_fd >= 0) options.masterListenFd = env.listen_fd;
    const auto start = std::chrono::steady_clock::now();
    try {
      store = c10::make_intrusive<c10d::TCPStore>(env.master_addr, options);
    } catch (const std::exception& e) {
      const std::string text = e.what();
      CommFailure failure{.rank = env.rank, .group = "world", .op = "rendezvous"};
      if (!serve && !env.agent_store) failure.peers = {0};
      failure.elapsed = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start);
      failure.cause = fmt::format("cannot {} the job's store at {} (MASTER_ADDR, MASTER_PORT): {}", serve ? "serve" : "reach",
                                  where, text.substr(0, text.find('\n')));
      throw CommError(std::move(failure));
    }
  }
  return {store, env.agent_store ? -1 : 0};
}

}  // namespace weft::detail
