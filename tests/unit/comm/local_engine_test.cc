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

// Both ranks start more calls than the ring holds, and move on in turns, so that each finds the other ahead by turns.
TEST(LocalEngine, MoreCallsInFlightThanTheRingHolds) {
  constexpr int kCalls = 3 * kRing;
  const auto engines = Engine::in_process(2);
  std::vector<std::shared_ptr<Group>> groups;
  for (const auto& engine : engines) groups.push_back(engine->create_group({0, 1}, "pair", std::chrono::seconds(30)));
  std::vector<std::vector<std::shared_ptr<Op>>> calls(2);
  std::vector<std::vector<float>> values(2, std::vector<float>(kCalls));
  for (const size_t rank : {1U, 0U}) {
    for (int k = 0; k < kCalls; ++k) {
      float& value = values[rank][static_cast<size_t>(k)] = static_cast<float>(k);
      auto op = std::make_shared<Op>();
      op->call = Call::all_reduce;
      op->dtype = Dtype::f32;
      op->reduction = Reduce::sum;
      op->count = 1;
      op->bytes = sizeof value;
      op->input = op->output = reinterpret_cast<char*>(&value);
      calls[rank].push_back(op);
      engines[rank]->start(groups[rank]->collectives(), op);
    }
  }
  for (int turn = 0; turn < 4 * kCalls; ++turn) engines[static_cast<size_t>(turn % 2)]->progress();
  for (const size_t rank : {0U, 1U}) {
    for (int k = 0; k < kCalls; ++k) {
      ASSERT_TRUE(calls[rank][static_cast<size_t>(k)]->complete) << "rank " << rank << ", call " << k;
      EXPECT_EQ(values[rank][static_cast<size_t>(k)], 2.0F * static_cast<float>(k));
    }
  }
}

}  // namespace
}  // namespace weft::local
