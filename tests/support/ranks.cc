#include "tests/support/ranks.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

namespace weft::testing {
namespace {

using Body = std::function<std::string(World&, const std::string&)>;

std::map<std::string, Body>& bodies() {
  static std::map<std::string, Body> registry;
  return registry;
}

}  // namespace

RankBody::RankBody(std::string name, Body body) { bodies().emplace(std::move(name), std::move(body)); }

void on_threads(int n, const std::function<void(World&)>& body) {
  World::threads(n, body, {.timeout = kTestTimeout});
}

}  // namespace weft::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
