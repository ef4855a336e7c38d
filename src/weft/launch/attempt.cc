#include "weft/launch/attempt.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "weft/core/error.h"
#include "weft/core/units.h"
#include "weft/launch/spawn.h"

namespace weft::launch {
namespace {

/// A rank that ends with a CommError mostly tells of another's death: this long its own failure may take to show.
constexpr std::chrono::milliseconds kCommErrorPatience{2000};
/// Output still in pipes after the last rank ended arrives at once, unless a process it left behind holds them open.
constexpr std::chrono::milliseconds kDrainLimit{500};

[[noreturn]] void system_error(const char* what) {
  throw ConfigError(fmt::format("weft run: {}: {}", what, std::strerror(errno)));
}

/// A TCP socket of 127.0.0.1, bound to a free port and not listening.
struct BoundSocket {
  int descriptor = -1;
  int port = 0;
  BoundSocket() {
    descriptor = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (descriptor < 0) system_error("socket");
    const int yes = 1;
    ::setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    if (::bind(descriptor, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
      system_error("bind to 127.0.0.1");
    if (::getsockname(descriptor, reinterpret_cast<sockaddr*>(&address), &length) != 0) system_error("getsockname");
    port = ntohs(address.sin_port);
  }
  ~BoundSocket() { ::close(descriptor); }
  BoundSocket(const BoundSocket&) = delete;
  BoundSocket& operator=(const BoundSocket&) = delete;
};

Show show_of(int rank, const LaunchOptions& options) {
  if (std::find(options.tee.begin(), options.tee.end(), rank) == options.tee.end()) return Show::no;
  return options.tee.size() == 1 ? Show::raw : Show::prefixed;
}

/// Whether the process has a handler for the signal (man 5 proc: SigCgt, a mask in hexadecimal digits).
bool catches(pid_t pid, int signal) {
  std::ifstream status(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("SigCgt:")) return (std::stoull(line.substr(7), nullptr, 16) >> (signal - 1)) & 1;
  }
  return false;
}

std::string how_it_ended(int code, std::chrono::duration<double> lived) {
  const std::string after = " after " + seconds_text(lived.count());
  if (code <= 128 || code - 128 >= NSIG) return fmt::format("exited with code {}{}", code, after);
  const char* name = ::sigabbrev_np(code - 128);
  const std::string hint = code == 128 + SIGKILL ? " (the system kills so when memory runs out)" : "";
  return fmt::format("was killed by signal {} (SIG{}){}{}", code - 128, name ? name : "?", after, hint);
}

}  // namespace

Attempt::Attempt(const LaunchOptions& options, const Environment& job, const std::filesystem::path& log_dir,
                 int restart, SignalQueue& signals)
    : options_(options), signals_(signals) {
  const BoundSocket
      master;  // the launcher's copy goes at the end of this scope: when rank 0 dies, nobody holds the port
  const std::string suffix = restart == 0 ? ".log" : fmt::format(".restart-{}.log", restart);
  for (int rank = 0; rank < options.ranks; ++rank) {
    ranks_.push_back(
        std::make_unique<Rank>(rank, log_dir / fmt::format("rank-{}{}", rank, suffix), show_of(rank, options)));
  }
  try {
    for (int rank = 0; rank < options.ranks; ++rank) start(rank, job, restart, master.port, master.descriptor);
  } catch (...) {
    kill_all(SIGKILL);
    throw;
  }
}

Attempt::~Attempt() {
  kill_all(SIGKILL);  // none runs unless starting or run() threw
  for (auto& rank : ranks_) {
    if (rank->running) ::waitpid(rank->pid, nullptr, 0);
    for (const int pipe : rank->pipes) {
      if (pipe >= 0) ::close(pipe);
    }
  }
}

void Attempt::start(int number, const Environment& job, int restart, int port, int listen_fd) {
  Rank& rank = *ranks_[static_cast<size_t>(number)];
  std::array<int, 2> out{}, err{};
  if (::pipe2(out.data(), O_CLOEXEC) != 0 || ::pipe2(err.data(), O_CLOEXEC) != 0) system_error("pipe");
  rank.pipes[RankOutput::out] = out[0];
  rank.pipes[RankOutput::err] = err[0];
  for (const int pipe : rank.pipes) ::fcntl(pipe, F_SETFL, O_NONBLOCK);

  SpawnOptions child{.command = options_.command, .environment = job, .stdout_fd = out[1], .stderr_fd = err[1]};
  for (const char* name : {"RANK", "LOCAL_RANK", "ROLE_RANK"}) child.environment[name] = std::to_string(number);
  child.environment["MASTER_PORT"] = std::to_string(port);
  child.environment["TORCHELASTIC_RESTART_COUNT"] = std::to_string(restart);
  if (number == 0) {
    child.stdin_fd = STDIN_FILENO;
    child.environment["WEFT_MASTER_LISTEN_FD"] = std::to_string(listen_fd);
    child.inherited_fd = listen_fd;
    child.own_group = ::isatty(STDIN_FILENO) == 0;  // only the foreground group may read from a terminal
  }
  rank.own_group = child.own_group;
  try {
    rank.pid = spawn(child);
  } catch (...) {
    ::close(out[1]);
    ::close(err[1]);
    throw;
  }
  rank.running = true;
  ::close(out[1]);
  ::close(err[1]);
}

Outcome Attempt::run() {
  while (running() > 0) {
    const bool kill_first = kill_at_ && (!stop_at_ || *kill_at_ < *stop_at_);
    wait_for_events(kill_first ? kill_at_ : stop_at_);
    while (const auto signal = signals_.next()) on_signal(*signal);
    reap();
    const auto now = Clock::now();
    if (stop_at_ && now >= *stop_at_) stop_others();
    if (kill_at_ && now >= *kill_at_) {
      kill_all(SIGKILL);
      kill_at_.reset();
    }
  }
  drain();
  return outcome();
}

void Attempt::wait_for_events(std::optional<Clock::time_point> until) {
  std::vector<pollfd> watched{{signals_.descriptor(), POLLIN, 0}};
  std::vector<std::pair<Rank*, RankOutput::Stream>> owners{{nullptr, RankOutput::out}};
  for (auto& rank : ranks_) {
    for (const auto stream : {RankOutput::out, RankOutput::err}) {
      if (rank->pipes[stream] < 0) continue;
      watched.push_back({rank->pipes[stream], POLLIN, 0});
      owners.emplace_back(rank.get(), stream);
    }
  }
  int timeout = -1;
  if (until) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(*until - Clock::now()).count();
    timeout = static_cast<int>(std::max<int64_t>(0, left));
  }
  if (::poll(watched.data(), watched.size(), timeout) <= 0) return;
  for (size_t i = 1; i < watched.size(); ++i) {
    if (watched[i].revents != 0) read_output(*owners[i].first, owners[i].second);
  }
}

/// Takes what is there; closes the pipe at end of file.
void Attempt::read_output(Rank& rank, RankOutput::Stream stream) {
  std::array<char, 1 << 16> buffer;
  for (;;) {
    const ssize_t count = ::read(rank.pipes[stream], buffer.data(), buffer.size());
    if (count > 0) {
      rank.output.take(stream, {buffer.data(), static_cast<size_t>(count)});
      if (static_cast<size_t>(count) < buffer.size()) return;
    } else if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
      return;
    } else {
      ::close(rank.pipes[stream]);
      rank.pipes[stream] = -1;
      return;
    }
  }
}

void Attempt::reap() {
  for (size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = *ranks_[i];
    siginfo_t end{};
    if (!rank.running || ::waitid(P_PID, static_cast<id_t>(rank.pid), &end, WEXITED | WNOHANG | WNOWAIT) != 0 ||
        end.si_pid == 0)
      continue;
    rank.code = end.si_code == CLD_EXITED ? end.si_status : 128 + end.si_status;
    // What a failed rank leaves in its group; before its number is given back and may name somebody else.
    if (rank.own_group && (rank.code != 0 || stopping_)) ::kill(-rank.pid, SIGKILL);
    ::waitpid(rank.pid, nullptr, 0);
    rank.running = false;
    rank.lived = Clock::now() - started_;
    if (rank.code != 0) note_failure(static_cast<int>(i));
  }
}

void Attempt::note_failure(int rank) {
  const auto is_comm = [&](int r) { return ranks_[static_cast<size_t>(r)]->code == static_cast<int>(ExitCode::comm); };
  if (stopping_) return;  // it fell to our own signal, or to what the first failure did
  if (blamed_ < 0) stopped_ = running();
  if (blamed_ < 0 || (is_comm(blamed_) && !is_comm(rank))) blamed_ = rank;
  if (interrupted_) {
    if (!stop_at_) stop_at_ = Clock::now() + options_.grace;  // the others were asked to end, too
  } else if (is_comm(blamed_)) {
    if (!stop_at_) stop_at_ = Clock::now() + kCommErrorPatience;
  } else {
    stop_others();
  }
}

void Attempt::stop_others() {
  stop_at_.reset();
  if (stopping_) return;
  stopping_ = true;
  kill_all(SIGTERM);
  kill_all(SIGCONT);  // a stopped rank takes no signal but this one and SIGKILL
  kill_at_ = Clock::now() + options_.grace;
}

void Attempt::on_signal(const Signal& signal) {
  if (signal.number == SIGCHLD) return;
  if (signal.number == SIGUSR1) return ask_for_flight_logs();
  if (interrupted_) {
    stopping_ = true;
    if (blamed_ < 0) stopped_ = running();
    kill_all(SIGKILL);
    return;
  }
  interrupted_ = true;
  std::fprintf(stderr, "weft run: SIG%s goes to all ranks; once more kills them\n", ::sigabbrev_np(signal.number));
  for (auto& rank : ranks_) {
    // A rank in the terminal's foreground group has had it already.
    if (rank->running && (rank->own_group || !signal.from_terminal))
      ::kill(rank->own_group ? -rank->pid : rank->pid, signal.number);
  }
}

/// SIGUSR1 ends a program that does not expect it, so it goes only to ranks that catch it.
void Attempt::ask_for_flight_logs() {
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const Rank& rank = *ranks_[i];
    if (!rank.running) continue;
    if (catches(rank.pid, SIGUSR1)) {
      ::kill(rank.pid, SIGUSR1);
    } else {
      std::fprintf(stderr, "weft run: rank %zu does not expect SIGUSR1 (weft::install_flight_signal); it was not sent\n", i);
    }
  }
}

/// To every running rank and what stands in its group.
void Attempt::kill_all(int signal) {
  for (auto& rank : ranks_) {
    if (rank->running) ::kill(rank->own_group ? -rank->pid : rank->pid, signal);
  }
}

void Attempt::drain() {
  const auto limit = Clock::now() + kDrainLimit;
  const auto open = [&] {
    return std::any_of(ranks_.begin(), ranks_.end(),
                       [](const auto& rank) { return rank->pipes[0] >= 0 || rank->pipes[1] >= 0; });
  };
  while (open() && Clock::now() < limit) {
    wait_for_events(limit);
    while (signals_.next()) {
    }
  }
  for (auto& rank : ranks_) rank->output.finish();
}

size_t Attempt::running() const {
  return static_cast<size_t>(
      std::count_if(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank->running; }));
}

Outcome Attempt::outcome() {
  Outcome result{.stopped = stopped_, .interrupted = interrupted_};
  int guilty = blamed_;
  for (size_t i = 0; guilty < 0 && i < ranks_.size(); ++i) {
    if (ranks_[i]->code != 0) guilty = static_cast<int>(i);  // killed by the second interrupt
  }
  if (guilty >= 0) {
    const Rank& rank = *ranks_[static_cast<size_t>(guilty)];
    result.failure = Failure{.rank = guilty,
                             .code = rank.code,
                             .how = how_it_ended(rank.code, rank.lived),
                             .tail = rank.output.tail(),
                             .log = rank.output.log()};
  }
  return result;
}

}  // namespace weft::launch
