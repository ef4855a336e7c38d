// 100,000 random calls of mixed groups, sizes, dtypes and operations on the local back end against a simple reference.
#include <gtest/gtest.h>

#include "tests/unit/comm/local_stress.h"

namespace weft::local {
namespace {

TEST(LocalStress, HundredThousandRandomCalls) {
  stress::on_threads(4, [](Engine& engine) {
    stress::Rank(engine, {.operations = 100'000, .seed = 31, .max_elements = 1500, .large_elements = 300'000, .large_every = 400}).run();
  });
}

}  // namespace
}  // namespace weft::local
