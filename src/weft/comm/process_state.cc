#include "weft/comm/process_state.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

namespace weft::detail {
namespace {

struct Stat {
  char state = 0;  // 0: no such process
  std::string start;
};

Stat stat_of(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  std::string line;
  std::getline(file, line);
  // The name in brackets may hold anything; behind it come the state and, 19 fields later, the start time (man 5 proc).
  const size_t bracket = line.rfind(')');
  if (bracket == std::string::npos) return {};
  std::istringstream rest(line.substr(bracket + 1));
  Stat stat;
  rest >> stat.state;
  for (int i = 0; i < 19; ++i) rest >> stat.start;
  return stat;
}

}  // namespace

const std::string& this_host() {
  static const std::string name = [] {
    std::ifstream boot("/proc/sys/kernel/random/boot_id");
    std::string id;
    boot >> id;
    struct stat space {};
    if (::stat("/proc/self/ns/pid", &space) != 0) return std::string();
    return id + "-" + std::to_string(space.st_ino);
  }();
  return name;
}

const std::string& this_process() {
  static const std::string name = [] {
    const std::string pid = std::to_string(::getpid());
    return this_host() + " " + pid + " " + stat_of(pid).start;
  }();
  return name;
}

bool process_ended_or_stopped(const std::string& process) {
  std::istringstream in(process);
  std::string its_host, pid, start;
  if (!(in >> its_host >> pid >> start) || its_host != this_host()) return false;
  const Stat now = stat_of(pid);
  return now.state == 0 || now.start != start || now.state == 'Z' || now.state == 'X' || now.state == 'T';
}

}  // namespace weft::detail
