#include "tests/support/ranks.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "weft/core/error.h"

extern char** environ;

namespace weft::testing {
namespace {

using Body = std::function<std::string(World&, const std::string&)>;
using Clock = std::chrono::steady_clock;

std::map<std::string, Body>& bodies() {
  static std::map<std::string, Body> registry;
  return registry;
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// Messages to the test are lines "note TEXT" and at the end "result TEXT" (the rest of the stream).
void write_all(int fd, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = ::write(fd, text.data() + done, text.size() - done);
    if (count < 0 && errno != EINTR) return;
    if (count > 0) done += static_cast<size_t>(count);
  }
}

int result_fd() { return std::stoi(variable("WEFT_TEST_RESULT_FD")); }

// What a rank process does instead of running tests.
int run_body(const std::string& name) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  int exit_code = 0;
  std::string result;
  try {
    const auto body = bodies().find(name);
    if (body == bodies().end()) throw std::runtime_error("no rank body is named '" + name + "'");
    World world = World::init({.timeout = std::chrono::milliseconds(std::stoll(variable("WEFT_TEST_TIMEOUT_MS")))});
    result = body->second(world, variable("WEFT_TEST_ARGUMENT"));
  } catch (const Error& e) {
    exit_code = static_cast<int>(e.exit_code());
    result = e.what();
  } catch (const std::exception& e) {
    exit_code = 1;
    result = e.what();
  }
  if (exit_code == 0 && ::testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed()) exit_code = 1;
  write_all(result_fd(), "result " + result);
  return exit_code;
}

// A socket bound to a free port of the loopback interface: rank 0 takes it over, so that no other program can get the port.
struct Port {
  Port() : socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    if (socket < 0 || ::bind(socket, reinterpret_cast<sockaddr*>(&address), length) != 0 || ::listen(socket, 128) != 0 ||
        ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
      throw std::runtime_error(std::string("no free port: ") + std::strerror(errno));
    }
    number = ntohs(address.sin_port);
  }
  ~Port() { ::close(socket); }
  int socket;
  int number = 0;
};

class SpawnActions {
 public:
  SpawnActions() { posix_spawn_file_actions_init(&actions_); }
  ~SpawnActions() { posix_spawn_file_actions_destroy(&actions_); }
  void inherit(int fd) { posix_spawn_file_actions_adddup2(&actions_, fd, fd); }  // clears close-on-exec
  void no_input() { posix_spawn_file_actions_addopen(&actions_, STDIN_FILENO, "/dev/null", O_RDONLY, 0); }
  const posix_spawn_file_actions_t* get() const { return &actions_; }

 private:
  posix_spawn_file_actions_t actions_;
};

pid_t spawn_self(const SpawnActions& actions, const std::map<std::string, std::string>& variables) {
  std::map<std::string, std::string> all;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text = *entry;
    all[text.substr(0, text.find('='))] = text.substr(text.find('=') + 1);
  }
  for (const auto& [name, value] : variables) all[name] = value;
  std::vector<std::string> lines;
  for (const auto& [name, value] : all) lines.push_back(name + "=" + value);
  std::vector<char*> pointers;
  for (std::string& line : lines) pointers.push_back(line.data());
  pointers.push_back(nullptr);
  char program[] = "/proc/self/exe";
  char* arguments[] = {program, nullptr};
  pid_t pid = -1;
  const int error = ::posix_spawn(&pid, program, actions.get(), nullptr, arguments, pointers.data());
  if (error != 0) throw std::runtime_error(std::string("cannot start a rank: ") + std::strerror(error));
  return pid;
}

}  // namespace

RankBody::RankBody(std::string name, Body body) { bodies().emplace(std::move(name), std::move(body)); }

void on_threads(int n, const std::function<void(World&)>& body, BackendKind backend) {
  World::threads(n, body, {.backend = backend, .timeout = kTestTimeout});
}

void note(const std::string& text) { write_all(result_fd(), "note " + text + "\n"); }

RankProcesses::RankProcesses(int n, const std::string& body, const std::string& argument, ProcessOptions options)
    : processes_(static_cast<size_t>(n)) {
  const Port port;
  for (int r = 0; r < n; ++r) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
    auto variables = options.environment;
    const std::string size = std::to_string(n), rank = std::to_string(r);
    variables.insert({{"RANK", rank}, {"WORLD_SIZE", size}, {"LOCAL_RANK", rank}, {"LOCAL_WORLD_SIZE", size},
                      {"GROUP_RANK", "0"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", std::to_string(port.number)},
                      {"TORCHELASTIC_RUN_ID", std::to_string(::getpid())}, {"TORCHELASTIC_RESTART_COUNT", "0"},
                      {"OMP_NUM_THREADS", "1"}, {"WEFT_BACKEND", options.backend}, {"WEFT_TEST_BODY", body},
                      {"WEFT_TEST_ARGUMENT", argument}, {"WEFT_TEST_RESULT_FD", std::to_string(ends[1])},
                      {"WEFT_TEST_TIMEOUT_MS", std::to_string(options.timeout.count())}});
    SpawnActions actions;
    actions.no_input();
    actions.inherit(ends[1]);
    if (r == 0 && n > 1) {
      actions.inherit(port.socket);
      variables["WEFT_MASTER_LISTEN_FD"] = std::to_string(port.socket);
    }
    Process& process = processes_[static_cast<size_t>(r)];
    process.pipe = ends[0];
    ::fcntl(process.pipe, F_SETFL, O_NONBLOCK);
    process.pid = spawn_self(actions, variables);
    ::close(ends[1]);
  }
}

RankProcesses::~RankProcesses() {
  for (Process& process : processes_) {
    if (!process.ended && process.pid > 0) ::kill(process.pid, SIGKILL);
    reap(process, true);
    if (process.pipe >= 0) ::close(process.pipe);
  }
}

void RankProcesses::reap(Process& process, bool block) {
  if (process.ended || process.pid <= 0) return;
  if (::waitpid(process.pid, &process.status, block ? 0 : WNOHANG) == process.pid) process.ended = true;
}

// Reads all pipes until `enough`; false after kPatience, or when nothing more can come.
bool RankProcesses::read_some(const std::function<bool()>& enough) {
  const auto until = Clock::now() + kPatience;
  while (!enough()) {
    std::vector<pollfd> polled;
    std::vector<Process*> owners;
    for (Process& process : processes_) {
      if (process.pipe < 0) continue;
      polled.push_back({process.pipe, POLLIN, 0});
      owners.push_back(&process);
    }
    if (polled.empty() || Clock::now() > until) return enough();
    ::poll(polled.data(), polled.size(), 100);
    for (Process* process : owners) {
      char buffer[4096];
      ssize_t count;
      while ((count = ::read(process->pipe, buffer, sizeof buffer)) > 0) process->received.append(buffer, static_cast<size_t>(count));
      if (count == 0) {
        ::close(process->pipe);
        process->pipe = -1;
      }
    }
  }
  return true;
}

bool RankProcesses::await_note(int rank, const std::string& text) {
  Process& process = processes_[static_cast<size_t>(rank)];
  const auto seen = [&] { return process.received.find("note " + text + "\n") != std::string::npos; };
  return read_some([&] { return seen() || process.pipe < 0; }) && seen();
}

void RankProcesses::signal(int rank, int number) { ::kill(pid(rank), number); }

std::vector<RankResult> RankProcesses::wait(std::vector<int> ranks) {
  if (ranks.empty()) {
    for (size_t r = 0; r < processes_.size(); ++r) ranks.push_back(static_cast<int>(r));
  }
  const auto ended = [&] {
    for (const int r : ranks) {
      if (processes_[static_cast<size_t>(r)].pipe >= 0) return false;
    }
    return true;
  };
  if (!read_some(ended)) ADD_FAILURE() << "rank processes were still running after " << kPatience.count() << " s";
  std::vector<RankResult> results;
  for (Process& process : processes_) {
    const bool waited = process.pipe < 0;  // the pipe is closed: the process is ending
    if (!waited) ::kill(process.pid, SIGKILL);
    reap(process, true);
    RankResult result;
    result.exit_code = WIFSIGNALED(process.status) ? 128 + WTERMSIG(process.status) : WEXITSTATUS(process.status);
    const size_t at = process.received.find("result ");
    if (at != std::string::npos) result.result = process.received.substr(at + std::strlen("result "));
    results.push_back(std::move(result));
  }
  return results;
}

std::vector<RankResult> on_processes(int n, const std::string& body, const std::string& argument, const std::string& backend) {
  return RankProcesses(n, body, argument, {.backend = backend, .timeout = kTestTimeout, .environment = {}}).wait();
}

}  // namespace weft::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const std::string body = weft::testing::variable("WEFT_TEST_BODY");
  return body.empty() ? RUN_ALL_TESTS() : weft::testing::run_body(body);
}
