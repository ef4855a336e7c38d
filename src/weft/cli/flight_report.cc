#include "weft/cli/flight_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <vector>

#include "weft/core/error.h"

namespace weft::cli {
namespace {

struct Call {
  uint64_t sequence = 0;
  std::string op, dtype, state;
  int64_t numel = 0, start_us = 0;
  int peer = -1;  // of the group

  bool message() const { return op == "send" || op == "recv"; }
  /// What must be equal on all members of a collective; the sizes of an uneven all_to_all may differ.
  std::string text() const {
    if (op == "barrier" || op == "all_to_all") return op;
    return fmt::format("{} of {} {}{}", op, numel, dtype, op == "broadcast" ? fmt::format(" from root {}", peer) : "");
  }
};

struct GroupLog {
  std::string name;
  std::vector<int> ranks;
  uint64_t collectives = 0;  // made by this rank so far
  std::vector<Call> calls;   // oldest first; old ones have left the log
};

struct RankLog {
  int64_t now_us = 0;
  std::string failure;
  std::map<std::string, GroupLog> groups;  // by key
};

using Logs = std::map<int, RankLog>;

RankLog parse(const Json& json) {
  RankLog log{.now_us = json.at("now_us").get<int64_t>(), .failure = json.value("failure", ""), .groups = {}};
  for (const Json& group : json.at("groups")) {
    log.groups[group.at("key")] = {group.at("name"), group.at("ranks"), group.at("collectives").get<uint64_t>(), {}};
  }
  for (const Json& call : json.at("calls")) {
    log.groups.at(call.at("group")).calls.push_back({call.at("seq").get<uint64_t>(), call.at("op"), call.value("dtype", ""),
                                                     call.at("state"), call.at("numel").get<int64_t>(),
                                                     call.at("start_us").get<int64_t>(), call.value("peer", -1)});
  }
  return log;
}

Logs read_all(const std::filesystem::path& folder) {
  Logs logs;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    // flight-rank3.1.json is of a second world in the same process; its ranks are other ranks.
    if (!name.starts_with("flight-rank") || std::count(name.begin(), name.end(), '.') != 1) continue;
    std::ifstream file(entry.path());
    std::stringstream text;
    text << file.rdbuf();
    const Json json = parse_json(text.str(), entry.path().string());
    try {
      logs.emplace(json.at("rank").get<int>(), parse(json));
    } catch (const std::exception& e) {
      throw ConfigError(fmt::format("{}: is no flight log of this version: {}", entry.path().string(), e.what()));
    }
  }
  if (logs.empty()) {
    throw ConfigError(fmt::format("{}: holds no flight-rank*.json. They are written when communication fails and WEFT_FLIGHT_DIR "
                                  "is set (weft run sets it), and when weft run gets SIGUSR1", folder.string()));
  }
  return logs;
}

/// The oldest call that did not end. A call that is followed by one that ended has ended too, though nobody looked.
std::optional<Call> pending(const GroupLog& group, bool messages) {
  std::optional<Call> found;
  for (const Call& call : group.calls) {
    if (call.message() != messages) continue;
    if (call.state == "done") found.reset();
    else if (!found) found = call;
  }
  return found;
}

struct Wait {
  int rank;
  std::string group;
  Call call;
  std::vector<int> waits_for;  // world ranks
  double seconds;
};

std::vector<Wait> find_waits(const Logs& logs) {
  std::vector<Wait> waits;
  for (const auto& [rank, log] : logs) {
    for (const auto& [key, group] : log.groups) {
      const auto seconds = [&, now = log.now_us](const Call& call) { return static_cast<double>(now - call.start_us) / 1e6; };
      if (const auto call = pending(group, false)) {
        Wait wait{rank, group.name, *call, {}, seconds(*call)};
        for (const int member : group.ranks) {
          if (member == rank) continue;
          const auto its_log = logs.find(member);
          if (its_log != logs.end()) {
            const auto its_group = its_log->second.groups.find(key);
            if (its_group != its_log->second.groups.end() && its_group->second.collectives > call->sequence) continue;
          }
          wait.waits_for.push_back(member);
        }
        waits.push_back(std::move(wait));
      }
      if (const auto call = pending(group, true); call && call->peer >= 0) {
        waits.push_back({rank, group.name, *call, {group.ranks.at(static_cast<size_t>(call->peer))}, seconds(*call)});
      }
    }
  }
  return waits;
}

/// The first collective of a group that members made differently, among those that are still in their logs.
Json find_difference(const Logs& logs) {
  std::map<std::string, std::map<uint64_t, std::map<int, const Call*>>> table;  // group, sequence, rank
  std::map<std::string, std::string> names;
  for (const auto& [rank, log] : logs) {
    for (const auto& [key, group] : log.groups) {
      names[key] = group.name;
      for (const Call& call : group.calls) {
        if (!call.message()) table[key][call.sequence][rank] = &call;
      }
    }
  }
  for (const auto& [key, sequences] : table) {
    for (const auto& [sequence, calls] : sequences) {
      const std::string first = calls.begin()->second->text();
      if (std::all_of(calls.begin(), calls.end(), [&](const auto& call) { return call.second->text() == first; })) continue;
      Json difference{{"group", names[key]}, {"seq", sequence}, {"calls", Json::array()}};
      for (const auto& [rank, call] : calls) difference["calls"].push_back({{"rank", rank}, {"call", call->text()}});
      return difference;
    }
  }
  return nullptr;
}

std::string last_call(const RankLog& log) {
  const Call* last = nullptr;
  std::string group_name;
  for (const auto& [key, group] : log.groups) {
    if (group.calls.empty() || (last && last->start_us > group.calls.back().start_us)) continue;
    last = &group.calls.back();
    group_name = group.name;
  }
  if (!last) return "made no call";
  return fmt::format("made {} #{} of '{}' last, {:.1f} s before its log", last->op, last->sequence, group_name,
                     static_cast<double>(log.now_us - last->start_us) / 1e6);
}

std::string ranks_text(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

/// Who is waited for and waits for nobody, and else who waits in a circle.
std::vector<std::string> judge(const Logs& logs, const std::vector<Wait>& waits, const Json& difference) {
  std::vector<std::string> verdict;
  if (!difference.is_null()) {
    std::vector<std::string> calls;
    for (const Json& call : difference["calls"])
      calls.push_back(fmt::format("rank {} called {}", call["rank"].get<int>(), call["call"].get<std::string>()));
    verdict.push_back(fmt::format("the ranks call different things as collective #{} of '{}': {}",
                                  difference["seq"].get<uint64_t>(), difference["group"].get<std::string>(),
                                  fmt::join(calls, "; ")));
  }
  std::map<int, std::vector<const Wait*>> waited_for;
  std::set<int> waiting;
  for (const Wait& wait : waits) {
    if (!wait.waits_for.empty()) waiting.insert(wait.rank);
    for (const int rank : wait.waits_for) waited_for[rank].push_back(&wait);
  }
  for (const auto& [rank, by] : waited_for) {
    if (waiting.contains(rank)) continue;
    // The call that lacks fewest others says most about this one.
    const Wait& first = **std::min_element(by.begin(), by.end(), [](const Wait* a, const Wait* b) {
      return std::pair(a->waits_for.size(), a->call.start_us) < std::pair(b->waits_for.size(), b->call.start_us);
    });
    const auto log = logs.find(rank);
    verdict.push_back(fmt::format("rank {} never came to {} #{} of '{}'; it {}", rank, first.call.op, first.call.sequence,
                                  first.group, log == logs.end() ? "left no log: killed, stopped, or not started"
                                                                 : last_call(log->second)));
  }
  if (verdict.empty() && !waiting.empty()) {
    verdict.push_back(fmt::format("{} wait for each other", ranks_text({waiting.begin(), waiting.end()})));
  }
  if (verdict.empty()) verdict.push_back("no rank waits for another");
  return verdict;
}

}  // namespace

Json read_flight_logs(const std::filesystem::path& folder) {
  const Logs logs = read_all(folder);
  const std::vector<Wait> waits = find_waits(logs);
  std::set<int> members;
  Json report{{"ranks", Json::array()}, {"no_log", Json::array()}, {"failures", Json::array()}, {"waits", Json::array()}};
  for (const auto& [rank, log] : logs) {
    report["ranks"].push_back(rank);
    if (!log.failure.empty()) report["failures"].push_back({{"rank", rank}, {"text", log.failure}});
    for (const auto& [key, group] : log.groups) members.insert(group.ranks.begin(), group.ranks.end());
  }
  for (const int rank : members) {
    if (!logs.contains(rank)) report["no_log"].push_back(rank);
  }
  for (const Wait& wait : waits) {
    report["waits"].push_back({{"rank", wait.rank}, {"op", wait.call.op}, {"seq", wait.call.sequence}, {"group", wait.group},
                               {"for", wait.waits_for}, {"seconds", wait.seconds}});
  }
  report["difference"] = find_difference(logs);
  report["verdict"] = judge(logs, waits, report["difference"]);
  return report;
}

std::string flight_report_text(const Json& report) {
  std::string text;
  for (const Json& line : report["verdict"]) text += fmt::format("! {}\n", line.get<std::string>());
  text += fmt::format("\nlogs of {}", ranks_text(report["ranks"].get<std::vector<int>>()));
  if (!report["no_log"].empty()) text += fmt::format("; none of {}", ranks_text(report["no_log"].get<std::vector<int>>()));
  text += "\n";
  for (const Json& wait : report["waits"]) {
    const auto waits_for = wait["for"].get<std::vector<int>>();
    text += fmt::format("  rank {} is in {} #{} of '{}' for {:.1f} s, {}\n", wait["rank"].get<int>(), wait["op"].get<std::string>(),
                        wait["seq"].get<uint64_t>(), wait["group"].get<std::string>(), wait["seconds"].get<double>(),
                        waits_for.empty() ? "all members have come" : "waits for " + ranks_text(waits_for));
  }
  // Usually one reason, told by all ranks.
  std::map<std::string, std::vector<int>> failures;
  for (const Json& failure : report["failures"]) failures[failure["text"]].push_back(failure["rank"].get<int>());
  for (const auto& [reason, ranks] : failures) text += fmt::format("  {} failed: {}\n", ranks_text(ranks), reason);
  return text;
}

}  // namespace weft::cli
