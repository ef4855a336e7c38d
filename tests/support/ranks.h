// Real ranks for tests: threads of this process, or processes of this program.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "weft/comm/world.h"

namespace weft::testing {

/// Default deadline of test worlds: far above what a loaded two-core machine needs, far below CTest's time-out.
inline constexpr std::chrono::seconds kTestTimeout{30};

/// Runs body on n threads as ranks of the local back end. A gtest failure inside counts; an exception fails the test.
void on_threads(int n, const std::function<void(World&)>& body);

/// A function that rank processes run, registered under a name at program start:
///   const RankBody kSum("sum", [](World& world, const std::string& argument) -> std::string { ... });
/// Its result text is returned to the test that started it.
struct RankBody {
  RankBody(std::string name, std::function<std::string(World&, const std::string&)> body);
};

struct RankResult {
  int exit_code = 0;    ///< 128 + signal when killed
  std::string result;   ///< what the body returned, or the text of the exception it threw
};

/// Starts n processes of this test program that run the named body with `argument` and waits for all of them.
/// backend: "local" or "gloo".
std::vector<RankResult> on_processes(int n, const std::string& body, const std::string& argument = "",
                                     const std::string& backend = "local");

}  // namespace weft::testing
