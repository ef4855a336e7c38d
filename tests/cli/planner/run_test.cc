// `weft run` with real processes: shell scripts as ranks.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "weft/core/json.h"
#include "weft/launch/spawn.h"

namespace weft {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

struct Result {
  int code = -1;  ///< 128 + signal when killed
  std::string out, err;
};

class WeftRun : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / ("weft_run_test_" + std::to_string(::getpid()));
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_ / "tmp");
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  pid_t start(const std::vector<std::string>& arguments, const std::string& omp_threads = "") {
    launch::SpawnOptions options{.command = {WEFT_BINARY, "run"}, .environment = launch::process_environment()};
    options.command.insert(options.command.end(), arguments.begin(), arguments.end());
    options.environment.erase("OMP_NUM_THREADS");
    if (!omp_threads.empty()) options.environment["OMP_NUM_THREADS"] = omp_threads;
    options.environment["TMPDIR"] = (folder_ / "tmp").string();
    options.environment["F"] = folder_.string();
    options.stdout_fd = ::open((folder_ / "out").c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    options.stderr_fd = ::open((folder_ / "err").c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    const pid_t pid = launch::spawn(options);
    ::close(options.stdout_fd);
    ::close(options.stderr_fd);
    return pid;
  }

  Result finish(pid_t pid) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    return {WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status), read_text(folder_ / "out"),
            read_text(folder_ / "err")};
  }

  Result run(const std::vector<std::string>& arguments, const std::string& omp_threads = "") {
    return finish(start(arguments, omp_threads));
  }

  /// Waits for files that the ranks make, bounded by CTest's time-out.
  void wait_for(const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      while (!std::filesystem::exists(folder_ / name)) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  /// A process id that a rank wrote.
  pid_t pid_in(const std::string& name) { return std::stoi(read_text(folder_ / name)); }

  /// Waits until a process that is no child of this one has ended; where init reaps no orphans it stays a zombie.
  static void wait_for_end(pid_t pid) {
    for (;;) {
      std::string state;
      std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
      stat >> state >> state >> state;  // pid (name) state; the names here hold no blank
      if (!stat || state == "Z" || state == "X") return;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  std::filesystem::path folder_;
};

TEST_F(WeftRun, GivesTorchrunsEnvironment) {
  const Result result =
      run({"-n", "3", "--tee", "all", "--", "sh", "-c",
           "echo $RANK/$WORLD_SIZE local $LOCAL_RANK/$LOCAL_WORLD_SIZE node $GROUP_RANK master $MASTER_ADDR restart "
           "$TORCHELASTIC_RESTART_COUNT id ${WEFT_RUN_ID:+set} omp $OMP_NUM_THREADS fd ${WEFT_MASTER_LISTEN_FD:+set}"},
          "5");
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("[0] 0/3 local 0/3 node 0 master 127.0.0.1 restart 0 id set omp 5 fd set\n"));
  EXPECT_THAT(result.out, HasSubstr("[1] 1/3 local 1/3 node 0 master 127.0.0.1 restart 0 id set omp 5 fd\n"));
  EXPECT_THAT(result.out, HasSubstr("[2] 2/3 local 2/3"));
  EXPECT_EQ(result.err, "");
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "tmp"));  // logs of a good run go when nobody asked for them
}

// SIGUSR1 ends a program that does not catch it: only ranks that do get it. They find the folder for flight logs in a
// variable, and a temporary one that holds any is kept.
TEST_F(WeftRun, ForwardsTheFlightSignalToRanksThatCatchIt) {
  const pid_t pid = start({"-n", "2", "--", "bash", "-c",
                           "if [ $RANK = 0 ]; then trap 'echo {} > $WEFT_FLIGHT_DIR/flight-rank0.json; touch $F/got' USR1; fi; "
                           "touch $F/ready.$RANK; until [ -e $F/got ]; do sleep 0.05; done"});
  wait_for({"ready.0", "ready.1"});
  ::kill(pid, SIGUSR1);
  const Result result = finish(pid);
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("rank 1 does not expect SIGUSR1"));
  EXPECT_THAT(result.err, Not(HasSubstr("rank 0 does not")));
  int kept = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_ / "tmp")) {
    kept += entry.path().filename() == "flight-rank0.json";
  }
  EXPECT_EQ(kept, 1);
}

TEST_F(WeftRun, CoresAreSharedByTheRanks) {
  const auto threads = [](unsigned ranks) {
    return std::to_string(std::max(1U, std::thread::hardware_concurrency() / ranks)) + "\n";
  };
  EXPECT_EQ(run({"-n", "1", "--", "sh", "-c", "echo $OMP_NUM_THREADS"}).out, threads(1));
  EXPECT_EQ(run({"-n", "3", "--", "sh", "-c", "echo $OMP_NUM_THREADS"}).out, threads(3));
}

// The port is free for programs that bind it themselves; those that take the inherited socket find it bound to the same
// port.
TEST_F(WeftRun, MasterSocketIsInheritedByRankZeroOnly) {
  const Result result = run({"-n", "2", "--tee", "all", "--", "sh", "-c",
                             "if [ $RANK = 0 ]; then readlink /proc/$$/fd/$WEFT_MASTER_LISTEN_FD; else ls -l "
                             "/proc/$$/fd | grep -c socket; fi; true"});
  EXPECT_THAT(result.out, HasSubstr("[0] socket:["));
  EXPECT_THAT(result.out, HasSubstr("[1] 0\n"));
}

TEST_F(WeftRun, ShowsRankZeroAsItIsAndKeepsStreamsApart) {
  const Result result = run({"-n", "2", "--", "sh", "-c", "echo result $RANK; echo note $RANK >&2"});
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.out, "result 0\n");
  EXPECT_EQ(result.err, "note 0\n");
}

TEST_F(WeftRun, LogsEveryRank) {
  const Result result = run({"-n", "2", "--tee", "none", "--log-dir", (folder_ / "logs").string(), "--", "sh", "-c",
                             "printf 'step 1\\rstep 2\\033[K\\nlast without newline %s' $RANK"});
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(read_text(folder_ / "logs" / "rank-1.log"), "step 2\nlast without newline 1\n");
  EXPECT_EQ(read_text(folder_ / "logs" / "rank-0.log"), "step 2\nlast without newline 0\n");
}

TEST_F(WeftRun, OtherRanksReadNothing) {
  const Result result = run({"-n", "2", "--tee", "1", "--", "sh", "-c", "if [ $RANK = 1 ]; then cat; echo end; fi"});
  EXPECT_EQ(result.out, "end\n");
}

TEST_F(WeftRun, FirstFailureEndsAllAndIsReported) {
  const Result result =
      run({"-n", "3", "--", "sh", "-c",
           "echo $$ > $F/pid$RANK; if [ $RANK = 1 ]; then while ! [ -s $F/pid0 -a -s $F/pid2 ]; do :; done; "
           "echo the reason is here >&2; exit 7; fi; sleep 1000"});
  EXPECT_EQ(result.code, 7);
  EXPECT_THAT(result.err, HasSubstr("weft run: rank 1 exited with code 7 after "));
  EXPECT_THAT(result.err, HasSubstr("2 other ranks were stopped"));
  EXPECT_THAT(result.err, HasSubstr("  | the reason is here\n"));
  const std::string mark = "weft run: log of rank 1: ";
  const size_t at = result.err.rfind(mark);
  ASSERT_NE(at, std::string::npos) << result.err;
  const std::string log = result.err.substr(at + mark.size());
  EXPECT_EQ(read_text(log.substr(0, log.size() - 1)), "the reason is here\n");
  wait_for_end(pid_in("pid0"));
  wait_for_end(pid_in("pid2"));
}

TEST_F(WeftRun, StubbornRanksAndTheirChildrenAreKilled) {
  const Result result =
      run({"-n", "3", "--grace", "0.2", "--", "sh", "-c",
           "trap '' TERM; sleep 1000 & echo $! > $F/child$RANK; "
           "if [ $RANK = 2 ]; then while ! [ -s $F/child0 -a -s $F/child1 ]; do :; done; exit 9; fi; wait"});
  EXPECT_EQ(result.code, 9);
  for (const char* child : {"child0", "child1", "child2"}) wait_for_end(pid_in(child));
}

TEST_F(WeftRun, DeathBySignalIsNamed) {
  const Result result = run({"-n", "3", "--", "sh", "-c", "if [ $RANK = 2 ]; then kill -SEGV $$; fi; sleep 1000"});
  EXPECT_EQ(result.code, 128 + SIGSEGV);
  EXPECT_THAT(result.err, HasSubstr("rank 2 was killed by signal 11 (SIGSEGV)"));
}

// Ranks that lose a peer end with code 3, often before the peer itself has ended.
TEST_F(WeftRun, TheCulpritIsBlamedAndNotWhoReportsIt) {
  const Result result =
      run({"-n", "3", "--", "sh", "-c",
           "if [ $RANK = 1 ]; then while ! [ -e $F/gone0 -a -e $F/gone2 ]; do :; done; echo my own fault; exit 5; fi; "
           "echo peer lost; touch $F/gone$RANK; exit 3"});
  EXPECT_EQ(result.code, 5);
  EXPECT_THAT(result.err, AllOf(HasSubstr("rank 1 exited with code 5"), HasSubstr("| my own fault"),
                                Not(HasSubstr("| peer lost"))));
}

TEST_F(WeftRun, CommErrorAloneIsReported) {
  const Result result =
      run({"-n", "2", "--grace", "0.1", "--", "sh", "-c", "if [ $RANK = 0 ]; then exit 3; fi; sleep 1000"});
  EXPECT_EQ(result.code, 3);
  EXPECT_THAT(result.err, HasSubstr("rank 0 exited with code 3"));
}

TEST_F(WeftRun, RestartsAllRanks) {
  const Result result =
      run({"-n", "2", "--max-restarts", "2", "--log-dir", (folder_ / "logs").string(), "--", "sh", "-c",
           "echo attempt $TORCHELASTIC_RESTART_COUNT; if [ $TORCHELASTIC_RESTART_COUNT = 0 -a $RANK = 1 ]; then exit "
           "4; fi"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("restart 1 of at most 2"));
  EXPECT_EQ(read_text(folder_ / "logs" / "rank-0.restart-1.log"), "attempt 1\n");
  EXPECT_EQ(run({"-n", "2", "--max-restarts", "1", "--", "sh", "-c", "exit 6"}).code, 6);
  EXPECT_THAT(run({"-n", "2", "--max-restarts", "1", "--", "sh", "-c", "exit 2"}).err,
              Not(HasSubstr("restart 1")));  // a wrong config stays wrong
}

TEST_F(WeftRun, InterruptIsForwardedAndRanksMayFinish) {
  const pid_t pid = start({"-n", "3", "--tee", "all", "--", "sh", "-c",
                           "trap 'echo saved; exit 0' INT; touch $F/ready$RANK; while :; do sleep 0.05; done"});
  wait_for({"ready0", "ready1", "ready2"});
  ::kill(pid, SIGINT);
  const Result result = finish(pid);
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("[0] saved"), HasSubstr("[1] saved"), HasSubstr("[2] saved")));
  EXPECT_THAT(result.err, HasSubstr("SIGINT goes to all ranks"));
}

TEST_F(WeftRun, InterruptEndsOrdinaryPrograms) {
  const pid_t pid = start({"-n", "2", "--", "sh", "-c", "touch $F/ready$RANK; exec sleep 1000"});
  wait_for({"ready0", "ready1"});
  ::kill(pid, SIGTERM);
  EXPECT_EQ(finish(pid).code, 128 + SIGTERM);
}

TEST_F(WeftRun, SecondInterruptKills) {
  const pid_t pid = start(
      {"-n", "2", "--", "sh", "-c", "trap 'touch $F/had$RANK' INT; touch $F/ready$RANK; while :; do sleep 0.05; done"});
  wait_for({"ready0", "ready1"});
  ::kill(pid, SIGINT);
  wait_for({"had0", "had1"});
  ::kill(pid, SIGINT);
  EXPECT_EQ(finish(pid).code, 128 + SIGKILL);
}

TEST_F(WeftRun, RanksDieWithTheLauncher) {
  const pid_t pid = start({"-n", "2", "--", "sh", "-c", "echo $$ > $F/pid$RANK; touch $F/ready$RANK; exec sleep 1000"});
  wait_for({"ready0", "ready1"});
  ::kill(pid, SIGKILL);
  EXPECT_EQ(finish(pid).code, 128 + SIGKILL);
  wait_for_end(pid_in("pid0"));
  wait_for_end(pid_in("pid1"));
}

TEST_F(WeftRun, ABackgroundProcessDoesNotHoldTheEnd) {
  const Result result = run({"-n", "1", "--", "sh", "-c", "sleep 1000 & echo $! > $F/daemon; echo done"});
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.out, "done\n");
  EXPECT_EQ(::kill(pid_in("daemon"), SIGKILL), 0);
}

TEST_F(WeftRun, OutlivesTheTerminalUnderNohup) {
  struct sigaction ignore {}, before {};
  ignore.sa_handler = SIG_IGN;
  ::sigaction(SIGHUP, &ignore, &before);  // the children inherit it
  const pid_t pid = start({"-n", "2", "--", "sh", "-c", "touch $F/ready$RANK; until [ -e $F/go ]; do sleep 0.05; done; echo done"});
  ::sigaction(SIGHUP, &before, nullptr);
  wait_for({"ready0", "ready1"});
  ::kill(pid, SIGHUP);
  std::ofstream(folder_ / "go") << "";
  const Result result = finish(pid);
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.out, "done\n");
}

TEST_F(WeftRun, AStoppedRankGetsItsSigterm) {
  const Result result = run({"-n", "2", "--grace", "1000", "--", "sh", "-c",
                             "trap 'touch $F/had$RANK; exit 0' TERM; touch $F/ready$RANK; if [ $RANK = 1 ]; then kill -STOP $$; fi; "
                             "until [ -e $F/ready1 ]; do sleep 0.05; done; if [ $RANK = 0 ]; then exit 7; fi; while :; do sleep 0.05; done"});
  EXPECT_EQ(result.code, 7);
  EXPECT_TRUE(std::filesystem::exists(folder_ / "had1"));
}

TEST_F(WeftRun, ResultsThatAFullDiskSwallowedAreAnError) {
  EXPECT_EQ(std::system(WEFT_BINARY " schedule 1f1b --ranks 2 --microbatches 2 > /dev/full 2>/dev/null") >> 8, 2);
}

// What earlier runs left behind does not pile up: the newest ten stay, and whatever a run still uses.
TEST_F(WeftRun, OldLogFoldersGoAndThoseInUseStay) {
  const std::filesystem::path tmp = folder_ / "tmp";
  const auto folder_of = [&](int i) { return tmp / ("weft-run-" + std::to_string(100 + i)); };
  const auto age = [](int i) { return std::filesystem::file_time_type::clock::now() - std::chrono::hours(i + 1); };
  for (int i = 0; i < 14; ++i) {
    std::filesystem::create_directories(folder_of(i));
    std::ofstream(folder_of(i) / "rank-0.log") << i;
    std::filesystem::last_write_time(folder_of(i), age(i));
  }
  std::filesystem::create_directories(tmp / "weft-other");
  const int in_use = ::open(folder_of(13).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  ASSERT_EQ(::flock(in_use, LOCK_SH), 0);
  EXPECT_EQ(run({"-n", "1", "--", "sh", "-c", "exit 5"}).code, 5);
  ::close(in_use);
  for (int i = 0; i < 14; ++i) EXPECT_EQ(std::filesystem::exists(folder_of(i)), i < 9 || i == 13) << i;
  EXPECT_TRUE(std::filesystem::exists(tmp / "weft-other"));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(tmp), {}), 9 + 1 + 1 + 1);  // and this run's own: it failed
}

TEST_F(WeftRun, AStartThatFailsLeavesNoLogs) {
  EXPECT_EQ(run({"-n", "2", "--", "no-such-program"}).code, 2);
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "tmp"));
}

TEST_F(WeftRun, ALogFolderHoldsOneRun) {
  const std::string logs = (folder_ / "logs").string();
  EXPECT_EQ(run({"-n", "3", "--log-dir", logs, "--", "true"}).code, 0);
  EXPECT_EQ(run({"-n", "2", "--log-dir", logs, "--", "true"}).code, 0);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "logs/rank-2.log"));
  EXPECT_TRUE(std::filesystem::exists(folder_ / "logs/rank-1.log"));
  const pid_t pid = start({"-n", "1", "--log-dir", logs, "--", "sh", "-c", "touch $F/ready; until [ -e $F/go ]; do sleep 0.05; done"});
  wait_for({"ready"});
  const std::filesystem::path kept = folder_ / "kept";
  std::filesystem::create_directories(kept);
  launch::SpawnOptions second{.command = {WEFT_BINARY, "run", "-n", "1", "--log-dir", logs, "--", "true"},
                              .environment = launch::process_environment()};
  second.stderr_fd = ::open((kept / "err").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  int status = 0;
  ::waitpid(launch::spawn(second), &status, 0);
  ::close(second.stderr_fd);
  EXPECT_EQ(WEXITSTATUS(status), 2);
  EXPECT_THAT(read_text(kept / "err"), HasSubstr("another weft run writes its logs there"));
  std::ofstream(folder_ / "go") << "";
  EXPECT_EQ(finish(pid).code, 0);
}

// Before the ranks are up, in the middle of their start, and before they have handlers of their own.
TEST_F(WeftRun, AnInterruptAtAnyMomentOfTheStartEndsEverything) {
  for (const int signal : {SIGINT, SIGTERM}) {
    for (const std::string moment : {"", "logs", "logs/rank-2.log", "up0", "up2"}) {
      for (const char* name : {"logs", "up0", "up1", "up2"}) std::filesystem::remove_all(folder_ / name);
      const pid_t pid = start({"-n", "3", "--log-dir", (folder_ / "logs").string(), "--", "sh", "-c",
                               "echo $$ > $F/up$RANK.new; mv $F/up$RANK.new $F/up$RANK; exec sleep 1000"});
      if (!moment.empty()) wait_for({moment});
      ::kill(pid, signal);
      EXPECT_EQ(finish(pid).code, 128 + signal) << moment;
      for (const char* rank : {"up0", "up1", "up2"}) {
        if (std::filesystem::exists(folder_ / rank)) wait_for_end(pid_in(rank));
      }
    }
  }
}

TEST_F(WeftRun, WrongUseIsExplained) {
  const Result missing = run({"-n", "2", "--", "no-such-program"});
  EXPECT_EQ(missing.code, 2);
  EXPECT_THAT(missing.err, HasSubstr("'no-such-program' is no program in PATH"));
  const Result tee = run({"-n", "2", "--tee", "1-2", "--", "true"});
  EXPECT_EQ(tee.code, 2);
  EXPECT_THAT(tee.err, HasSubstr("'1-2' is no rank or range of ranks from 0 to 1"));
  const Result many = run({"-n", "100000", "--tee", "none", "--", "true"});
  EXPECT_EQ(many.code, 2);
  EXPECT_THAT(many.err, HasSubstr("-n: 100000 ranks; from 1 to "));
  const Result none = run({"-n", "0", "--grace", "-1", "--", "true"});
  EXPECT_EQ(none.code, 2);
  EXPECT_THAT(none.err, AllOf(HasSubstr("-n: 0 ranks; from 1 to "), HasSubstr("--grace"), Not(HasSubstr("--tee"))));
  EXPECT_EQ(run({"-n", "2"}).code, 2);
}

}  // namespace
}  // namespace weft
