#include "weft/comm/store_transport.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <thread>

#include "weft/core/cause.h"
#include "weft/core/error.h"

namespace weft::detail {

using std::chrono::milliseconds;

StoreTransport::StoreTransport(c10::intrusive_ptr<c10d::Store> store, int rank, int size, int host, bool one_host)
    : store_(std::move(store)), rank_(rank), devices_(one_host), pulse_(store_->clone(), rank, size, host) {}

// Gloo's own connecting knows neither who is missing nor that the world has failed.
void StoreTransport::await_members(const std::vector<int>& world_ranks, const std::string& name, const std::string& key_base,
                                   milliseconds timeout) {
  const auto key = [&](int r) { return fmt::format("join/{}/{}", key_base, r); };
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - start);
  };
  const auto give_up = [&](const Cause& cause) {
    throw CommError({.rank = rank_, .group = name, .op = "create_group", .peers = cause.culprits, .elapsed = elapsed(),
                     .cause = cause.reason});
  };
  std::vector<std::string> keys;
  for (const int r : world_ranks) keys.push_back(key(r));
  store_->set(key(rank_), "1");
  auto pause = std::chrono::microseconds(200);
  while (!store_->check(keys)) {
    if (const auto cause = failure()) give_up(*cause);
    if (elapsed() > timeout) {
      std::vector<int> missing;
      for (const int r : world_ranks) {
        if (!store_->check({key(r)})) missing.push_back(r);
      }
      give_up(pulse_.fail({missing, fmt::format("the deadline of {:g} s passed; rank{} {} never came to create group '{}'",
                                                static_cast<double>(timeout.count()) / 1e3, missing.size() > 1 ? "s" : "",
                                                fmt::join(missing, ", "), name)}));
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(20000));
  }
}

c10::intrusive_ptr<c10d::Backend> StoreTransport::create_group(const std::vector<int>& world_ranks,
                                                               const std::string& name,
                                                               const std::shared_ptr<Progress>& progress,
                                                               milliseconds timeout) {
  const auto me = std::find(world_ranks.begin(), world_ranks.end(), rank_) - world_ranks.begin();
  std::string error;
  try {
    await_members(world_ranks, name, progress->group, timeout);
    const auto meeting = c10::make_intrusive<c10d::PrefixStore>("gloo/" + progress->group, store_);
    auto group = devices_.make_group(meeting, static_cast<int>(me), static_cast<int>(world_ranks.size()), timeout);
    pulse_.watch(progress);
    pulse_.end_with_world(group);
    return group;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    error = e.what();
  }
  // Nobody has started call 0 of a group that is being made: only silent ranks can be told apart.
  const Cause cause = pulse_.blame(world_ranks, *progress, 0, cause_line(error));
  throw CommError({.rank = rank_, .group = name, .op = "create_group", .peers = cause.culprits, .cause = cause.reason});
}

}  // namespace weft::detail
