#include "weft/comm/flight_log.h"

#include <c10/core/ScalarType.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

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

}  // namespace

int FlightLog::add_group(const std::string& name, const std::vector<int>& world_ranks) {
  std::lock_guard lock(mutex_);
  groups_.push_back({name, world_ranks});
  return static_cast<int>(groups_.size()) - 1;
}

uint64_t FlightLog::begin(Entry entry, std::chrono::steady_clock::time_point start) {
  entry.start_ns = ns(start);
  std::lock_guard lock(mutex_);
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
  out["groups"] = json::array();
  for (const Group& group : groups_) out["groups"].push_back({{"name", group.name}, {"ranks", group.world_ranks}});
  out["calls"] = json::array();
  for (uint64_t i = next_ > kEntries ? next_ - kEntries : 0; i < next_; ++i) {
    const Entry& entry = ring_[i % kEntries];
    json call = {{"group", groups_[static_cast<size_t>(entry.group)].name},
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

void FlightLog::dump_on_failure() const {
  const char* folder = std::getenv("WEFT_FLIGHT_DIR");
  if (!folder || !*folder) return;
  std::ofstream(std::string(folder) + "/flight-rank" + std::to_string(rank_) + ".json") << json() << '\n';
}

}  // namespace weft::detail
