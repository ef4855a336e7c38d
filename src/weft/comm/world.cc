#include "weft/comm/world.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>

#include "weft/comm/gloo.h"
#include "weft/comm/local_transport.h"
#include "weft/comm/rendezvous.h"
#include "weft/comm/single_transport.h"
#include "weft/comm/state.h"
#include "weft/comm/store_transport.h"
#include "weft/core/cause.h"
#include "weft/launch/environment.h"

namespace weft {
namespace detail {

class WorldState {
 public:
  std::shared_ptr<WorldCore> core;
  Comm comm;
};

GroupRecord::~GroupRecord() {
  if (backend && !local && (failure || !dropped.empty())) backend->abort();
}

std::shared_ptr<CommState> make_group(const std::shared_ptr<WorldCore>& core, const std::vector<int>& world_ranks,
                                      const std::string& name, std::chrono::milliseconds timeout) {
  auto comm = std::make_shared<CommState>();
  comm->core = core;
  comm->world_ranks = world_ranks;
  comm->rank = static_cast<int>(std::find(world_ranks.begin(), world_ranks.end(), core->rank) - world_ranks.begin());
  comm->name = name;
  comm->timeout = timeout;
  if (comm->size() == 1) return comm;
  auto record = std::make_shared<GroupRecord>();
  record->progress = std::make_shared<Progress>();
  const std::string base = fmt::format("{}@{}", name, fmt::join(world_ranks, ","));
  record->progress->group = fmt::format("{}#{}", base, core->groups[base]++);
  record->log_group = core->log.add_group(record->progress->group, name, world_ranks);
  comm->backend = core->transport->create_group(world_ranks, name, record->progress, timeout);
  comm->local = dynamic_cast<local::LocalGroup*>(comm->backend.get());
  comm->gloo = comm->backend && is_gloo(*comm->backend);
  record->backend = comm->backend;
  record->local = comm->local != nullptr;
  comm->record = std::move(record);
  return comm;
}

}  // namespace detail

namespace {

using detail::WorldCore;
using detail::WorldState;

int debug_level() {
  const char* value = std::getenv("WEFT_DEBUG");
  return value && *value ? std::atoi(value) : 0;
}

std::shared_ptr<WorldCore> make_core(int rank, int size, const WorldOptions& options) {
  if (size < 1 || rank < 0 || rank >= size) throw ConfigError(fmt::format("rank {} of {} does not exist", rank, size));
  if (options.timeout.count() <= 0) {
    throw ConfigError(fmt::format("WorldOptions::timeout = {} ms must be positive", options.timeout.count()));
  }
  auto core = std::make_shared<WorldCore>(rank);
  core->size = size;
  core->timeout = options.timeout;
  core->debug_level = debug_level();
  return core;
}

// Collective: the group of all ranks.
std::shared_ptr<WorldState> open(const std::shared_ptr<WorldCore>& core) {
  auto state = std::make_shared<WorldState>();
  state->core = core;
  std::vector<int> all(static_cast<size_t>(core->size));
  std::iota(all.begin(), all.end(), 0);
  state->comm = Comm(detail::make_group(core, all, "world", core->timeout));
  return state;
}

BackendKind choose_backend(BackendKind asked, bool one_host) {
  if (asked != BackendKind::automatic) return asked;
  const char* value = std::getenv("WEFT_BACKEND");
  if (!value || !*value) return one_host ? BackendKind::local : BackendKind::gloo;
  if (std::string(value) == "local") return BackendKind::local;
  if (std::string(value) == "gloo") return BackendKind::gloo;
  throw ConfigError(fmt::format("WEFT_BACKEND={} is no back end; use local or gloo, or unset it", value));
}

// Worlds of one process are told apart by their number: all ranks make them in the same order.
int next_world_number() {
  static std::atomic<int> worlds{0};
  return worlds++;
}

std::shared_ptr<detail::Transport> connect(const launch::RankEnvironment& env, const WorldOptions& options) {
  const bool one_host = env.local_size == env.size;
  const std::string key = fmt::format("weft/{}/{}", launch::local_rendezvous_key(env), next_world_number());
  switch (choose_backend(options.backend, one_host)) {
    case BackendKind::automatic:
    case BackendKind::local:
      if (!one_host) {
        throw ConfigError(fmt::format("back end 'local' needs all ranks on one machine; here are {} of {}; use gloo",
                                      env.local_size, env.size));
      }
      return std::make_shared<detail::LocalTransport>(local::LocalWorld::join(key, env.rank, env.size, options.timeout));
    case BackendKind::gloo: {
      const auto meeting = detail::job_store(env, options.timeout);
      return std::make_shared<detail::StoreTransport>(c10::make_intrusive<c10d::PrefixStore>(key, meeting.store), env.rank,
                                                      env.size, meeting.host, one_host);
    }
    case BackendKind::fake: return std::make_shared<detail::FakeTransport>();
  }
  throw InternalError("unknown BackendKind");
}

}  // namespace

World World::init(WorldOptions options) {
  const launch::RankEnvironment env = launch::read_environment();
  auto core = make_core(env.rank, env.size, options);
  core->local_rank = env.local_rank;
  core->local_size = env.local_size;
  core->node = env.node;
  if (env.size > 1) core->transport = connect(env, options);
  return World(open(core));
}

World World::from_store(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, WorldOptions options) {
  if (options.backend != BackendKind::automatic && options.backend != BackendKind::gloo) {
    throw ConfigError("World::from_store makes gloo groups; WorldOptions::backend must be automatic or gloo");
  }
  auto core = make_core(rank, size, options);
  if (size > 1) core->transport = std::make_shared<detail::StoreTransport>(store, rank, size, -1, false);
  return World(open(core));
}

World World::from_backend(const c10::intrusive_ptr<c10d::Backend>& backend, WorldOptions options) {
  auto core = make_core(backend->getRank(), backend->getSize(), options);
  core->transport = std::make_shared<detail::GivenTransport>(backend);
  return World(open(core));
}

World World::from_mpi(int rank, int size, const Broadcast& broadcast, WorldOptions options) {
  auto core = make_core(rank, size, options);
  if (size == 1) return World(open(core));
  const auto place = detail::meet(rank, size, broadcast);
  core->local_rank = place.local_rank;
  core->local_size = place.local_size;
  core->node = place.node;
  switch (choose_backend(options.backend, place.one_host)) {
    case BackendKind::local:
      if (!place.one_host) {
        throw ConfigError(fmt::format("back end 'local' needs all ranks on one machine; here are {} of {}; use gloo",
                                      place.local_size, size));
      }
      core->transport = std::make_shared<detail::LocalTransport>(
          local::LocalWorld::join("weft/host/" + place.key, rank, size, options.timeout));
      break;
    case BackendKind::fake: core->transport = std::make_shared<detail::FakeTransport>(); break;
    default: {
      const auto store = detail::store_over(rank, place.one_host, broadcast, options.timeout);
      core->transport = std::make_shared<detail::StoreTransport>(store, rank, size, 0, place.one_host);
    }
  }
  return World(open(core));
}

World World::rehearse(int rank, int size) {
  auto core = make_core(rank, size, {.backend = BackendKind::fake});
  core->transport = std::make_shared<detail::FakeTransport>();
  return World(open(core));
}

namespace {

// One transport per thread.
std::vector<std::shared_ptr<detail::Transport>> connect_threads(int n, BackendKind backend) {
  std::vector<std::shared_ptr<detail::Transport>> transports;
  if (backend == BackendKind::gloo) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    for (int r = 0; r < n; ++r) transports.push_back(std::make_shared<detail::StoreTransport>(store, r, n, -1, true));
  } else if (backend == BackendKind::fake) {
    for (int r = 0; r < n; ++r) transports.push_back(std::make_shared<detail::FakeTransport>());
  } else {
    for (auto& world : local::LocalWorld::in_process(n)) {
      transports.push_back(std::make_shared<detail::LocalTransport>(std::move(world)));
    }
  }
  return transports;
}

}  // namespace

void World::threads(int n, const std::function<void(World&)>& fn, WorldOptions options) {
  if (n < 1) throw ConfigError(fmt::format("World::threads: {} ranks", n));
  auto transports = connect_threads(n, choose_backend(options.backend, true));
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r) {
    threads.emplace_back([&, r, transport = std::move(transports[static_cast<size_t>(r)])]() mutable {
      const auto record = [&](const std::string& reason) {
        {
          std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
        }
        if (transport) transport->abort(r, reason);
      };
      try {
        auto core = make_core(r, n, options);
        core->local_rank = r;
        core->local_size = n;
        core->transport = transport;
        World world(open(core));
        guard(world, [&] { fn(world); });  // aborts before unwinding closes connections that peers wait on
      } catch (const std::exception& e) {
        record(cause_text(e.what()));
      } catch (...) {
        record("an exception that is no std::exception");
      }
      transport.reset();
    });
  }
  for (auto& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

int World::rank() const { return state_->core->rank; }
int World::size() const { return state_->core->size; }
int World::local_rank() const { return state_->core->local_rank; }
int World::local_size() const { return state_->core->local_size; }
int World::node() const { return state_->core->node; }
const Comm& World::comm() const { return state_->comm; }

void World::abort(const std::string& reason) const {
  if (state_->core->transport) state_->core->transport->abort(rank(), reason);
}

void guard(const World& world, const std::function<void()>& fn) {
  try {
    fn();
  } catch (const std::exception& e) {
    world.abort(cause_text(e.what()));
    throw;
  } catch (...) {
    world.abort("an exception that is no std::exception");
    throw;
  }
}

}  // namespace weft
