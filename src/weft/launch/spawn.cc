#include "weft/launch/spawn.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "weft/core/error.h"
#include "weft/launch/signals.h"

namespace weft::launch {
namespace {

/// Everything the child needs, made before vfork: the child may only make system calls.
struct Prepared {
  const char* path;
  char* const* argv;
  char* const* envp;
  int stdin_fd, stdout_fd, stderr_fd, inherited_fd;
  bool own_group, outlives_terminal;
  pid_t launcher;
  sigset_t signals;
};

/// Runs in the child, on the launcher's memory, until exec. Returns the errno of what failed.
int become_rank(const Prepared& p) {
  // Handlers would run on the launcher's memory; exec resets them anyway.
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD, SIGPIPE, SIGUSR1, SIGUSR2}) ::signal(signal, SIG_DFL);
  if (p.outlives_terminal) ::signal(SIGHUP, SIG_IGN);
  if (p.own_group && ::setpgid(0, 0) != 0) return errno;
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return errno;
  if (::getppid() != p.launcher) ::_exit(128 + SIGKILL);  // it died before prctl
  if (::dup2(p.stdin_fd, STDIN_FILENO) < 0) return errno;
  if (p.stdout_fd >= 0 && ::dup2(p.stdout_fd, STDOUT_FILENO) < 0) return errno;
  if (p.stderr_fd >= 0 && ::dup2(p.stderr_fd, STDERR_FILENO) < 0) return errno;
  if (p.inherited_fd >= 0 && ::fcntl(p.inherited_fd, F_SETFD, 0) != 0) return errno;
  ::sigprocmask(SIG_SETMASK, &p.signals, nullptr);
  ::execve(p.path, p.argv, p.envp);
  return errno;
}

/// The only function that calls vfork: nothing but become_rank runs in the child.
__attribute__((noinline)) pid_t vfork_rank(const Prepared& prepared, volatile int* failure) {
  const pid_t pid = ::vfork();
  if (pid == 0) {
    *failure = become_rank(prepared);
    ::_exit(127);
  }
  return pid;
}

/// As the shell: a name with a slash is a path, another is looked up in PATH.
std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) return name;
  const char* path = std::getenv("PATH");
  std::string_view rest = path ? path : "/usr/local/bin:/usr/bin:/bin";
  for (;;) {
    const size_t colon = rest.find(':');
    const std::string candidate = std::string(colon == 0 ? "." : rest.substr(0, colon)) + "/" + name;
    if (::access(candidate.c_str(), X_OK) == 0 && std::filesystem::is_regular_file(candidate)) return candidate;
    if (colon == std::string_view::npos) break;
    rest.remove_prefix(colon + 1);
  }
  throw ConfigError(fmt::format("'{}' is no program in PATH (give its path, for instance ./{})", name, name));
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

}  // namespace

pid_t spawn(const SpawnOptions& options) {
  const std::string path = find_program(options.command.at(0));
  std::vector<std::string> arguments = options.command, variables;
  for (const auto& [key, value] : options.environment) variables.push_back(key + "=" + value);
  const std::vector<char*> argv = pointers(arguments), envp = pointers(variables);
  const int null_fd = options.stdin_fd >= 0 ? -1 : ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  Prepared prepared{.path = path.c_str(),
                    .argv = argv.data(),
                    .envp = envp.data(),
                    .stdin_fd = options.stdin_fd >= 0 ? options.stdin_fd : null_fd,
                    .stdout_fd = options.stdout_fd,
                    .stderr_fd = options.stderr_fd,
                    .inherited_fd = options.inherited_fd,
                    .own_group = options.own_group,
                    .outlives_terminal = is_ignored(SIGHUP),
                    .launcher = ::getpid(),
                    .signals = {}};
  sigemptyset(&prepared.signals);
  // No signal between vfork and exec: its handler would run in the child on the launcher's memory.
  sigset_t all, before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  volatile int failure = 0;
  const pid_t pid = vfork_rank(prepared, &failure);
  const int fork_error = errno;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (null_fd >= 0) ::close(null_fd);
  if (pid < 0) throw ConfigError(fmt::format("cannot start a process: {}", std::strerror(fork_error)));
  if (failure != 0) throw ConfigError(fmt::format("'{}' cannot be started: {}", path, std::strerror(failure)));
  return pid;
}

}  // namespace weft::launch
