#include "weft/comm/flight_log.h"

#include <c10/core/ScalarType.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "weft/comm/flight_dump.h"
#include "weft/core/error.h"
#include "weft/core/log.h"

namespace weft::detail {
namespace {

const char* state_name(FlightLog::State state) {
  switch (state) {
    case FlightLog::State::started: return "started";
    case FlightLog::State::done: return "done";
    case FlightLog::State::failed: return "failed";
  }
  return "";
}

// The logs of this process, for a dump on demand.
struct Registry {
  std::mutex mutex;
  std::vector<const FlightLog*> logs;
  std::map<int, int> made;  // logs of each rank so far
};

Registry& registry() {
  static Registry& all = *new Registry();  // never destroyed: a dump may be asked for until the process ends
  return all;
}

int number_of_next(int rank) {
  std::lock_guard lock(registry().mutex);
  return registry().made[rank]++;
}

}  // namespace

FlightLog::FlightLog(int rank) : rank_(rank), number_(number_of_next(rank)) {
  std::lock_guard lock(registry().mutex);
  registry().logs.push_back(this);
}

FlightLog::~FlightLog() {
  std::lock_guard lock(registry().mutex);
  std::erase(registry().logs, this);
}

int FlightLog::add_group(const std::string& key, const std::string& name, const std::vector<int>& world_ranks) {
  std::lock_guard lock(mutex_);
  groups_.push_back({key, name, world_ranks});
  return static_cast<int>(groups_.size()) - 1;
}

uint64_t FlightLog::begin(Entry entry, std::chrono::steady_clock::time_point start) {
  entry.start_ns = ns(start);
  std::lock_guard lock(mutex_);
  if (!is_message(entry.op)) ++groups_[static_cast<size_t>(entry.group)].collectives;
  ring_[next_ % kEntries] = entry;
  return next_++;
}

void FlightLog::end(uint64_t ticket, State state) {
  const int64_t now = ns(std::chrono::steady_clock::now());
  std::lock_guard lock(mutex_);
  if (next_ - ticket > kEntries) return;
  Entry& entry = ring_[ticket % kEntries];
  entry.state = state;
  entry.end_ns = now;
}

std::string FlightLog::json() const {
  using nlohmann::json;
  json out;
  std::lock_guard lock(mutex_);
  out["rank"] = rank_;
  out["now_us"] = ns(std::chrono::steady_clock::now()) / 1000;
  if (!failure_.empty()) out["failure"] = failure_;
  out["groups"] = json::array();
  for (const Group& group : groups_) {
    out["groups"].push_back({{"key", group.key}, {"name", group.name}, {"ranks", group.world_ranks},
                             {"collectives", group.collectives}});
  }
  out["calls"] = json::array();
  for (uint64_t i = next_ > kEntries ? next_ - kEntries : 0; i < next_; ++i) {
    const Entry& entry = ring_[i % kEntries];
    json call = {{"group", groups_[static_cast<size_t>(entry.group)].key},
                 {"seq", entry.sequence},
                 {"op", name_of(entry.op)},
                 {"numel", entry.numel},
                 {"state", state_name(entry.state)},
                 {"start_us", entry.start_ns / 1000}};
    if (entry.dtype >= 0) call["dtype"] = c10::toString(static_cast<c10::ScalarType>(entry.dtype));
    if (entry.peer >= 0) call["peer"] = entry.peer;
    if (entry.end_ns > 0) call["end_us"] = entry.end_ns / 1000;
    out["calls"].push_back(std::move(call));
  }
  return out.dump(1);
}

void FlightLog::set_failure(const std::string& cause) {
  std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = cause;
}

void FlightLog::dump(const std::string& folder) const {
  {
    std::lock_guard lock(mutex_);
    if (groups_.empty()) return;
  }
  std::string file = folder + "/flight-rank" + std::to_string(rank_);
  if (number_ > 0) file += "." + std::to_string(number_);
  file += ".json";
  std::ofstream out(file);
  out << json() << std::endl;
  if (!out) throw ConfigError(file + ": the flight log cannot be written");
}

void FlightLog::dump_on_failure() const {
  const char* folder = std::getenv("WEFT_FLIGHT_DIR");
  if (!folder || !*folder) return;
  try {
    dump(folder);
  } catch (const std::exception& e) {
    log(LogLevel::warning, e.what());  // the failure itself must reach the caller
  }
}

}  // namespace weft::detail

namespace weft {

void dump_flight_logs(const std::string& folder) {
  auto& all = detail::registry();
  std::lock_guard lock(all.mutex);
  for (const auto* log : all.logs) log->dump(folder);
}

}  // namespace weft
