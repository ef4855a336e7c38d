// The engine of the local back end with ranks as threads, without torch. Also built with ThreadSanitizer (tests/CMakeLists.txt).
#include <gtest/gtest.h>

#include "tests/unit/comm/local_stress.h"

namespace weft::local {
namespace {

using stress::on_threads;
using std::chrono::milliseconds;

TEST(LocalEngine, RandomCallsOnTwoRanks) {
  on_threads(2, [](Engine& engine) { stress::Rank(engine, {.operations = 600, .seed = 11}).run(); });
}

TEST(LocalEngine, RandomCallsOnThreeRanks) {
  on_threads(3, [](Engine& engine) { stress::Rank(engine, {.operations = 300, .seed = 12, .large_elements = 500'000}).run(); });
}

TEST(LocalEngine, RandomCallsOnEightRanks) {
  on_threads(8, [](Engine& engine) { stress::Rank(engine, {.operations = 150, .seed = 13, .large_elements = 100'000}).run(); });
}

}  // namespace
}  // namespace weft::local
