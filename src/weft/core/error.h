// The three kinds of failure, each with the exit code that `weft` ends with.
#pragma once

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace weft {

/// Exit codes of the `weft` command (DESIGN: 0 success, 2 the user can fix it, 3 communication, 70 our bug).
enum class ExitCode : int { ok = 0, config = 2, comm = 3, internal = 70 };

/// Base of every error that Weft throws on purpose.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  virtual ExitCode exit_code() const noexcept = 0;
};

/// The user can fix it. The text states the value, the rule and a remedy.
class ConfigError : public Error {
 public:
  using Error::Error;
  ExitCode exit_code() const noexcept override { return ExitCode::config; }
};

/// What is known about a failed communication call. Unknown fields keep their defaults.
struct CommFailure {
  int rank = -1;                          ///< world rank that reports
  std::string group;                      ///< name of the Comm, for instance "world" or "tp"
  std::string op;                         ///< operation, for instance "all_reduce"
  uint64_t sequence = 0;                  ///< number of the operation within the group, from 0
  std::vector<int> peers;                 ///< world ranks at fault: dead, or never arrived
  std::chrono::milliseconds elapsed{0};   ///< time since the call was made
  std::string cause;                      ///< for instance "rank 2 exited", "deadline of 2 s passed", or an abort's reason
};

/// Communication failed: a peer died, never arrived, disagreed, or aborted. The group is unusable afterwards.
class CommError : public Error {
 public:
  explicit CommError(CommFailure failure);
  ExitCode exit_code() const noexcept override { return ExitCode::comm; }
  const CommFailure& failure() const noexcept { return failure_; }

 private:
  CommFailure failure_;
};

/// A broken invariant of Weft itself; never reachable from input.
class InternalError : public Error {
 public:
  using Error::Error;
  ExitCode exit_code() const noexcept override { return ExitCode::internal; }
};

/// One thing wrong with a configuration: `where` (a key or option), `what` (value and rule), `remedy`.
struct Finding {
  std::string where;
  std::string what;
  std::string remedy;
};

/// Collects every finding of a check, so that the user sees all of them at once.
class Findings {
 public:
  void add(std::string where, std::string what, std::string remedy = {});
  bool empty() const noexcept { return items_.empty(); }
  const std::vector<Finding>& items() const noexcept { return items_; }
  /// One line per finding: "where: what (remedy)".
  std::string text() const;
  /// Throws ConfigError("subject: N problems\n  ...") if there is any finding.
  void throw_if_any(const std::string& subject) const;

 private:
  std::vector<Finding> items_;
};

}  // namespace weft
