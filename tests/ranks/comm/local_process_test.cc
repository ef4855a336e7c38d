// The local back end with ranks as processes: random calls, and ranks that are killed, stopped, or end too early.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

#include "tests/unit/comm/local_stress.h"

extern char** environ;

namespace weft::local {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

// --- this program as a rank ------------------------------------------------------------------------------------------------

constexpr const char* kRankVariable = "WEFT_TEST_LOCAL_RANK";  // "body rank size key pipe"
constexpr milliseconds kDeadline{2000};                        // of the calls that are cut short

/// Writes to the pipe to the test.
struct Reporter {
  int fd;
  void operator()(const std::string& text) const {
    const std::string line = text + "\n";
    if (::write(fd, line.data(), line.size()) < 0) ::_exit(99);
  }
};

void all_reduce(Engine& engine, Lane& lane, std::vector<float>& data, milliseconds timeout) {
  auto op = std::make_shared<Op>();
  op->call = Call::all_reduce;
  op->dtype = Dtype::f32;
  op->reduction = Reduce::sum;
  op->count = data.size();
  op->bytes = data.size() * sizeof(float);
  op->input = op->output = reinterpret_cast<char*>(data.data());
  op->timeout = timeout;
  engine.start(lane, op);
  engine.wait(*op, Until::complete, {});
}

std::vector<int> all_ranks(const Engine& engine) {
  std::vector<int> ranks;
  for (int r = 0; r < engine.size(); ++r) ranks.push_back(r);
  return ranks;
}

void stress_body(Engine& engine, const Reporter& report) {
  stress::Rank(engine, {.operations = 400, .seed = 21}).run();
  report(::testing::Test::HasFailure() ? "wrong" : "right");
}

/// All-reduces without end; says when the first is done.
void endless_body(Engine& engine, const Reporter& report, milliseconds timeout) {
  auto group = engine.create_group(all_ranks(engine), "world", stress::kDeadline);
  std::vector<float> data(3'000'000);  // 12 MB: most of the time is spent inside
  all_reduce(engine, group->collectives(), data, stress::kDeadline);
  report("running");
  for (;;) all_reduce(engine, group->collectives(), data, timeout);
}

/// A 2 x 2 mesh, tp pairs {0,1} {2,3}, dp pairs {0,2} {1,3}. Rank 3 only takes part once.
void mesh_body(Engine& engine, const Reporter& report) {
  const int r = engine.rank();
  const std::vector<int> row = r < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 3};
  const std::vector<int> column = r % 2 == 0 ? std::vector<int>{0, 2} : std::vector<int>{1, 3};
  auto tp = engine.create_group(row, "tp", stress::kDeadline);
  auto dp = engine.create_group(column, "dp", stress::kDeadline);
  std::vector<float> data(1000);
  all_reduce(engine, tp->collectives(), data, stress::kDeadline);
  all_reduce(engine, dp->collectives(), data, stress::kDeadline);
  report("running");
  if (r == 3) ::pause();  // until it is killed
  for (;;) {
    all_reduce(engine, tp->collectives(), data, stress::kDeadline);
    all_reduce(engine, dp->collectives(), data, stress::kDeadline);
  }
}

/// Rank 1 ends without a goodbye, the others want something from each other.
void early_exit_body(Engine& engine, const Reporter& report) {
  auto group = engine.create_group(all_ranks(engine), "world", stress::kDeadline);
  std::vector<float> data(10);
  all_reduce(engine, group->collectives(), data, stress::kDeadline);
  report("running");
  if (engine.rank() == 1) ::_exit(0);
  for (;;) all_reduce(engine, group->collectives(), data, stress::kDeadline);
}

/// Returns whether this process is a rank; then it has done its part and exits.
bool run_as_rank() {
  const char* text = std::getenv(kRankVariable);
  if (text == nullptr) return false;
  std::istringstream in(text);
  std::string body, key;
  int rank, size, pipe;
  in >> body >> rank >> size >> key >> pipe;
  const Reporter report{pipe};
  try {
    auto engine = Engine::join(key, rank, size, body == "alone" ? milliseconds(200) : milliseconds(stress::kDeadline));
    if (body == "stress") stress_body(*engine, report);
    if (body == "endless") endless_body(*engine, report, stress::kDeadline);
    if (body == "endless_short") endless_body(*engine, report, kDeadline);
    if (body == "mesh") mesh_body(*engine, report);
    if (body == "early_exit") early_exit_body(*engine, report);
  } catch (const CommError& error) {
    std::string peers;
    for (int p : error.failure().peers) peers += " " + std::to_string(p);
    report("at fault:" + peers + "; " + error.failure().cause);
  } catch (const std::exception& error) {
    report(std::string("threw: ") + error.what());
  }
  std::_Exit(0);
}
const bool kIsRank = run_as_rank();

// --- the test's side -------------------------------------------------------------------------------------------------------

class Ranks {
 public:
  Ranks(const std::string& body, int size, int start) : key_("weft-test-" + std::to_string(::getpid()) + "-" + body) {
    for (int r = 0; r < start; ++r) {
      int ends[2];
      if (::pipe2(ends, O_CLOEXEC) != 0) std::abort();
      ::fcntl(ends[1], F_SETFD, 0);
      std::vector<std::string> texts;
      for (char** e = environ; *e != nullptr; ++e) texts.emplace_back(*e);
      texts.push_back(std::string(kRankVariable) + "=" + body + " " + std::to_string(r) + " " + std::to_string(size) + " " + key_ + " " +
                      std::to_string(ends[1]));
      std::vector<char*> environment;
      for (auto& text : texts) environment.push_back(text.data());
      environment.push_back(nullptr);
      std::string name = "rank";
      char* arguments[] = {name.data(), nullptr};
      pid_t pid;
      if (::posix_spawn(&pid, "/proc/self/exe", nullptr, nullptr, arguments, environment.data()) != 0) std::abort();
      ::close(ends[1]);
      pids_.push_back(pid);
      outputs_.push_back(::fdopen(ends[0], "r"));
    }
  }
  ~Ranks() {
    for (pid_t pid : pids_) ::kill(pid, SIGKILL);
    reap();
    for (FILE* output : outputs_) std::fclose(output);
  }
  /// Waits until all have ended.
  void reap() {
    for (pid_t pid : pids_) ::waitpid(pid, nullptr, 0);
    pids_.clear();
  }

  /// The next line that a rank reports.
  std::string line(int rank) {
    char buffer[4096];
    if (std::fgets(buffer, sizeof(buffer), outputs_[static_cast<size_t>(rank)]) == nullptr) return "(ended)";
    buffer[std::strcspn(buffer, "\n")] = '\0';
    return buffer;
  }
  void signal(int rank, int number) { ::kill(pids_[static_cast<size_t>(rank)], number); }
  /// Start of the names of the sockets that these ranks meet at.
  std::string socket_name() const { return fmt::format("@weft-{}-{:016x}", ::getuid(), std::hash<std::string>{}(key_)); }

 private:
  std::string key_;
  std::vector<pid_t> pids_;
  std::vector<FILE*> outputs_;
};

TEST(LocalProcesses, RandomCalls) {
  Ranks ranks("stress", 3, 3);
  for (int r = 0; r < 3; ++r) EXPECT_EQ(ranks.line(r), "right") << "rank " << r;
}

TEST(LocalProcesses, AKilledRankIsNamedByAllAndLeavesNothing) {
  Ranks ranks("endless", 3, 3);
  for (int r = 0; r < 3; ++r) ASSERT_EQ(ranks.line(r), "running");
  ranks.signal(2, SIGKILL);
  for (int r : {0, 1}) EXPECT_EQ(ranks.line(r), "at fault: 2; rank 2 exited or was killed");
  ranks.reap();
  std::ifstream sockets("/proc/net/unix");
  const std::string names((std::istreambuf_iterator<char>(sockets)), {});
  ASSERT_NE(names.find("Path"), std::string::npos) << "the list must be readable for this test to say anything";
  EXPECT_EQ(names.find(ranks.socket_name()), std::string::npos);
}

TEST(LocalProcesses, AStoppedRankIsNamedByAllAtTheDeadline) {
  Ranks ranks("endless_short", 3, 3);
  for (int r = 0; r < 3; ++r) ASSERT_EQ(ranks.line(r), "running");
  ranks.signal(2, SIGSTOP);
  for (int r : {0, 1}) {
    const std::string text = ranks.line(r);
    EXPECT_THAT(text, HasSubstr("at fault: 2;"));
    EXPECT_THAT(text, HasSubstr("within the deadline of 2 s"));
  }
  ranks.signal(2, SIGCONT);  // and it learns the same
  EXPECT_THAT(ranks.line(2), HasSubstr("at fault: 2;"));
}

TEST(LocalProcesses, SurvivorsOfAMeshNameTheDeadRankNotEachOther) {
  Ranks ranks("mesh", 4, 4);
  for (int r = 0; r < 4; ++r) ASSERT_EQ(ranks.line(r), "running");
  ranks.signal(3, SIGKILL);
  for (int r : {0, 1, 2}) EXPECT_EQ(ranks.line(r), "at fault: 3; rank 3 exited or was killed") << "rank " << r;
}

TEST(LocalProcesses, ARankThatExitsWithoutGoodbyeIsNamed) {
  Ranks ranks("early_exit", 3, 3);
  for (int r = 0; r < 3; ++r) ASSERT_EQ(ranks.line(r), "running");
  for (int r : {0, 2}) EXPECT_EQ(ranks.line(r), "at fault: 1; rank 1 exited or was killed");
}

TEST(LocalProcesses, RanksThatDoNotComeAreNamed) {
  Ranks ranks("alone", 3, 2);
  const std::string first = ranks.line(0), second = ranks.line(1);
  // Whoever gives up first ends, and may then be what the other one misses.
  EXPECT_TRUE(first.find("rank 2 did not come in time") != std::string::npos ||
              second.find("rank 2 did not come in time") != std::string::npos ||
              first.find("ranks 1, 2 did not come in time") != std::string::npos)
      << first << "\n" << second;
}

}  // namespace
}  // namespace weft::local
