#include "weft/comm/rendezvous.h"

#include <fmt/format.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "weft/comm/process_state.h"
#include "weft/core/cause.h"
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
      CommFailure failure{.rank = env.rank, .group = "world", .op = "rendezvous"};
      if (!serve && !env.agent_store) failure.peers = {0};
      failure.elapsed = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start);
      failure.cause = fmt::format("cannot {} the job's store at {} (MASTER_ADDR, MASTER_PORT): {}", serve ? "serve" : "reach",
                                  where, cause_line(e.what()));
      throw CommError(std::move(failure));
    }
  }
  return {store, env.agent_store ? -1 : 0};
}

namespace {

/// One rank's text on all ranks.
std::string spread(const std::string& mine, int rank, int root, const Broadcast& broadcast) {
  std::array<char, 256> buffer{};
  if (rank == root) std::memcpy(buffer.data(), mine.data(), std::min(mine.size(), buffer.size() - 1));
  broadcast(buffer.data(), buffer.size(), root);
  return buffer.data();
}

std::string random_key() {
  std::random_device source;
  return fmt::format("{:08x}{:08x}", source(), source());
}

}  // namespace

HostProgram meet(int rank, int size, const Broadcast& broadcast) {
  HostProgram place;
  place.key = spread(rank == 0 ? random_key() : "", rank, 0, broadcast);
  std::vector<std::string> hosts;
  for (int r = 0; r < size; ++r) hosts.push_back(spread(this_host(), rank, r, broadcast));
  const std::string& mine = hosts[static_cast<size_t>(rank)];
  std::vector<std::string> seen;
  for (int r = 0; r < size; ++r) {
    const std::string& host = hosts[static_cast<size_t>(r)];
    if (std::find(seen.begin(), seen.end(), host) == seen.end()) seen.push_back(host);
    if (host == mine && r < rank) ++place.local_rank;
  }
  place.local_size = static_cast<int>(std::count(hosts.begin(), hosts.end(), mine));
  place.node = static_cast<int>(std::find(seen.begin(), seen.end(), mine) - seen.begin());
  place.one_host = place.local_size == size;
  return place;
}

c10::intrusive_ptr<c10d::Store> store_over(int rank, bool one_host, const Broadcast& broadcast, std::chrono::milliseconds timeout) {
  // Kept until the process ends: ranks that end later still need it (see job_store).
  static std::mutex mutex;
  static auto& served = *new std::vector<c10::intrusive_ptr<c10d::Store>>();
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  const std::string host = one_host ? "127.0.0.1" : spread(name.data(), rank, 0, broadcast);
  c10d::TCPStoreOptions options;
  options.isServer = rank == 0;
  options.waitWorkers = false;
  options.timeout = timeout;
  options.port = 0;
  c10::intrusive_ptr<c10d::TCPStore> store;
  std::string port;  // a failure of rank 0 travels in its place: nobody waits for a port that does not come
  try {
    if (rank == 0) {
      store = c10::make_intrusive<c10d::TCPStore>(host, options);
      port = std::to_string(store->getPort());
    }
  } catch (const std::exception& e) {
    port = "!" + cause_line(e.what());
  }
  port = spread(port, rank, 0, broadcast);
  const auto fail = [&](const std::string& cause) {
    throw CommError({.rank = rank, .group = "world", .op = "rendezvous", .peers = {0}, .cause = cause});
  };
  if (port.starts_with('!')) fail("rank 0 cannot serve the store of this job: " + port.substr(1));
  if (rank > 0) {
    options.port = static_cast<uint16_t>(std::stoi(port));
    try {
      store = c10::make_intrusive<c10d::TCPStore>(host, options);
    } catch (const std::exception& e) {
      fail(fmt::format("cannot reach the store that rank 0 serves at {}:{}: {}", host, port, cause_line(e.what())));
    }
  }
  std::lock_guard lock(mutex);
  served.push_back(store);
  return store;
}

}  // namespace weft::detail
