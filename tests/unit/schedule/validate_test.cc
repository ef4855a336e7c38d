#include "weft/schedule/validate.h"

#include <gtest/gtest.h>

#include "tests/unit/schedule/schedules.h"
#include "weft/core/error.h"
#include "weft/schedule/count.h"
#include "weft/schedule/passes.h"
#include "weft/schedule/text.h"

namespace weft::schedule {
namespace {

std::string fault_of(std::string_view text, const Limits& limits = {}) {
  const auto fault = validate(from_text(text), limits);
  return fault ? fault->text() : "valid";
}

TEST(Validate, NamesRankStepAndCause) {
  EXPECT_EQ(fault_of("rank 0: F0 B0 F1 B1"), "valid");
  EXPECT_EQ(fault_of("rank 0: F0 B1 F1 B0"), "rank 0 step 1: B1 needs F1, which comes only at step 2");
  EXPECT_EQ(fault_of("rank 0: F0 B0 B1"), "rank 0 step 2: B1 needs F1, which is not in the list");
  EXPECT_EQ(fault_of("rank 0: F0 F1 B0"), "rank 0 step 1: F1 has no backward: B1 is missing");
  EXPECT_EQ(fault_of("rank 0: F0 F1 I0 W0 I1"), "rank 0 step 4: I1 has no weight gradient: W1 is missing");
  EXPECT_EQ(fault_of("rank 0: F0 I0 W0 F1 B1 W0"), "rank 0 step 5: W0 repeats W0 of step 2");
  EXPECT_EQ(fault_of("rank 0: F0 B0 I0"), "rank 0 step 2: I0 repeats B0 of step 1");
  EXPECT_EQ(fault_of("rank 0: F0 F1 B0 B1\nrank 1: F0 B0"), "rank 1 step 2: F1 is missing");
}

TEST(Validate, Deadlock) {
  // Rank 0 wants the gradient of 1 first, rank 1 computes it last and needs a forward that rank 0 runs later.
  const std::string text = fault_of("rank 0: F0 F1 B1 F2 B0 B2\nrank 1: F0 B0 F2 B2 F1 B1");
  EXPECT_EQ(text,
            "rank 0 step 2: deadlock: B1 waits for B1 of rank 1, which is stuck at step 2: F2 waits for F2 of rank 0, "
            "which is stuck at step 2: B1");
  // A pair starts when the inputs of both its halves are there.
  EXPECT_EQ(fault_of("rank 0: F0 (F1+B0) B1\nrank 1: F0 B0 F1 B1"), "valid");
  EXPECT_NE(fault_of("rank 0: F0 (F1+B0) B1\nrank 1: F0 F1 B0 B1").find("rank 0 step 1: deadlock"), std::string::npos);
}

TEST(Validate, TransfersShardsAndReduction) {
  EXPECT_EQ(fault_of("rank 0: F0 SEND_F0 RECV_B0 B0\nrank 1: RECV_F0 F0 B0 SEND_B0"), "valid");
  EXPECT_EQ(fault_of("rank 0: F0 RECV_B0 B0\nrank 1: RECV_F0 F0 B0 SEND_B0"),
            "rank 0 step 0: the output of F0 is never sent: SEND_F0 is missing");
  EXPECT_EQ(fault_of("rank 0: F0 SEND_F0 RECV_B0 B0\nrank 1: F0 B0 SEND_B0"),
            "rank 1 step 0: F0 needs RECV_F0, which is not in the list");
  EXPECT_NE(
      fault_of(
          "rank 0: F0 F1 SEND_F1 SEND_F0 RECV_B0 RECV_B1 B0 B1\nrank 1: RECV_F0 RECV_F1 F0 B0 SEND_B0 F1 B1 SEND_B1")
          .find("rank 1 step 0: RECV_F0.1 is receive 0"),
      std::string::npos);
  EXPECT_EQ(fault_of("rank 0: F0 SEND_F0 B0"),
            "rank 0 step 1: SEND_F0 has nowhere to go: the next stage is on this rank or there is none");
  EXPECT_EQ(fault_of("rank 0: UNSHARD F0 RESHARD B0"),
            "rank 0 step 3: B0 needs the parameters of stage 0, which are not gathered");
  EXPECT_EQ(fault_of("rank 0: UNSHARD F0 I0 RESHARD W0"), "valid");
  EXPECT_EQ(fault_of("rank 0: UNSHARD F0 B0"), "rank 0 step 0: UNSHARD is never freed: RESHARD is missing");
  EXPECT_EQ(fault_of("rank 0: F0 I0 REDUCE W0"),
            "rank 0 step 2: REDUCE comes before W0 of step 3, which still adds to the gradient");
  EXPECT_EQ(fault_of("rank 0: F0 B0 REDUCE REDUCE"), "rank 0 step 3: REDUCE repeats REDUCE of step 2");
  EXPECT_EQ(fault_of("rank 0: F0.0 F0.1 B0.1 REDUCE.1 B0.0"),
            "rank 0 step 4: the gradient of stage 0 is never reduced: REDUCE.0 is missing");
}

TEST(Validate, MemoryInFlight) {
  const Schedule schedule = one_f_one_b({4, 8, 1});
  EXPECT_FALSE(validate(schedule, {.in_flight = {4, 3, 2, 1}}));
  const auto fault = validate(schedule, {.in_flight = {4, 2, 2, 1}});
  ASSERT_TRUE(fault);
  EXPECT_EQ(fault->text(), "rank 1 step 2: F2 makes 3 micro-batches in flight, at most 2 are allowed");
  EXPECT_TRUE(validate(gpipe({4, 8, 1}), {.in_flight = {4, 4, 4, 4}}));
}

enum class Mutation { dropped, duplicated, swapped };

/// Changes one action of `list`; a swap exchanges two compute actions of one micro-batch and stage, whose order is
/// never free. Returns the earliest step whose meaning changed, or -1 when the list has nothing to swap.
int mutate(std::vector<Action>& list, Mutation mutation, std::mt19937& random) {
  const size_t at = std::uniform_int_distribution<size_t>(0, list.size() - 1)(random);
  if (mutation == Mutation::dropped) {
    list.erase(list.begin() + static_cast<std::ptrdiff_t>(at));
    return static_cast<int>(at);
  }
  if (mutation == Mutation::duplicated) {
    const size_t to = std::uniform_int_distribution<size_t>(0, list.size())(random);
    list.insert(list.begin() + static_cast<std::ptrdiff_t>(to), list[at]);
    return static_cast<int>(std::min(at, to));
  }
  for (size_t other = 0; other < list.size(); ++other) {
    if (other == at || !is_compute(list[at].kind) || !is_compute(list[other].kind) ||
        list[other].micro_batch != list[at].micro_batch || list[other].stage != list[at].stage)
      continue;
    std::swap(list[at], list[other]);
    return static_cast<int>(std::min(at, other));
  }
  return -1;
}

TEST(Validate, MutatedSchedulesAreRejectedWithTheStep) {
  std::mt19937 random(99);
  std::map<Mutation, int> rejected;
  for (int k = 0; k < 2400; ++k) {
    const test::Draw draw = test::draw(random, 6, 12);
    Schedule schedule = draw.generator->make(draw.sizes);
    if (k % 4 == 1) add_communication(schedule);
    if (k % 4 == 2) add_sharding(schedule);
    if (k % 4 == 3) add_communication(schedule), add_sharding(schedule);
    const Mutation mutation = static_cast<Mutation>(k % 3);
    auto& list = schedule.ranks[random() % schedule.ranks.size()];
    const std::string before = to_text(schedule);
    for (Action& action : list) action.with_next = false;  // pairs are checked above
    if (mutate(list, mutation, random) < 0) continue;
    const bool had_reduce = before.find("REDUCE") != before.npos;
    if (had_reduce && to_text(schedule).find("REDUCE") == std::string::npos)
      continue;  // its only one: reduction is optional
    const auto fault = validate(schedule);
    ASSERT_TRUE(fault) << draw.text() << " mutation " << static_cast<int>(mutation) << "\n"
                       << before << "became\n"
                       << to_text(schedule);
    ASSERT_GE(fault->rank, 0);
    ASSERT_LT(fault->rank, schedule.rank_count());
    ASSERT_GE(fault->step, 0);
    ASSERT_LE(static_cast<size_t>(fault->step), schedule.ranks[static_cast<size_t>(fault->rank)].size());
    ASSERT_NE(fault->text().find("step " + std::to_string(fault->step)), std::string::npos);
    ++rejected[mutation];
  }
  EXPECT_EQ(rejected.size(), 3u);
  for (const auto& [mutation, count] : rejected) EXPECT_GT(count, 300) << static_cast<int>(mutation);
}

/// Independent of validate(): orders the whole by list edges and data edges (Kahn). True if everything can run.
bool can_run(const Schedule& schedule) {
  std::vector<std::vector<int>> next;
  std::vector<int> needs;
  std::map<std::tuple<char, int, int>, int> producer;  // 'F' or 'G' (input gradient), stage, micro-batch
  std::vector<Action> nodes;
  for (const auto& list : schedule.ranks) {
    for (const Action& a : list) {
      const int id = static_cast<int>(nodes.size());
      nodes.push_back(a);
      if (a.kind == Kind::forward) producer[{'F', a.stage, a.micro_batch}] = id;
      if (a.kind == Kind::input_grad || a.kind == Kind::backward) producer[{'G', a.stage, a.micro_batch}] = id;
    }
  }
  next.resize(nodes.size());
  needs.assign(nodes.size(), 0);
  const auto edge = [&](int from, int to) {
    next[static_cast<size_t>(from)].push_back(to), ++needs[static_cast<size_t>(to)];
  };
  int id = 0;
  for (const auto& list : schedule.ranks) {
    for (size_t k = 0; k < list.size(); ++k, ++id) {
      const Action& a = list[k];
      if (k > 0) edge(id - 1, id);
      if (a.kind == Kind::forward && a.stage > 0) edge(producer.at({'F', a.stage - 1, a.micro_batch}), id);
      if (a.kind == Kind::weight_grad) edge(producer.at({'G', a.stage, a.micro_batch}), id);
      if (a.kind != Kind::input_grad && a.kind != Kind::backward) continue;
      edge(producer.at({'F', a.stage, a.micro_batch}), id);
      if (a.stage + 1 < schedule.stage_count()) edge(producer.at({'G', a.stage + 1, a.micro_batch}), id);
    }
  }
  std::vector<int> free;
  for (size_t n = 0; n < nodes.size(); ++n)
    if (needs[n] == 0) free.push_back(static_cast<int>(n));
  size_t done = 0;
  for (; !free.empty(); ++done) {
    const int at = free.back();
    free.pop_back();
    for (int to : next[static_cast<size_t>(at)])
      if (--needs[static_cast<size_t>(to)] == 0) free.push_back(to);
  }
  return done == nodes.size();
}

// Any two actions of a rank swapped: sometimes still right. The verdict equals that of a topological sort.
TEST(Validate, SwapsAgreeWithATopologicalSort) {
  std::mt19937 random(3);
  int wrong = 0, right = 0;
  for (int k = 0; k < 3000; ++k) {
    const test::Draw draw = test::draw(random, 5, 9);
    if (draw.generator->name == "forward") continue;
    Schedule schedule = draw.generator->make(draw.sizes);
    for (auto& list : schedule.ranks) {
      for (Action& action : list) action.with_next = false;
    }
    auto& list = schedule.ranks[random() % schedule.ranks.size()];
    const size_t a = random() % list.size(), b = std::min(list.size() - 1, a + 1 + random() % 3);
    std::swap(list[a], list[b]);
    const bool runs = can_run(schedule);
    ASSERT_EQ(!validate(schedule), runs) << draw.text() << "\n" << to_text(schedule);
    ++(runs ? right : wrong);
  }
  EXPECT_GT(wrong, 200);
  EXPECT_GT(right, 200);
}

TEST(Validate, RequireValidThrows) {
  Schedule schedule = gpipe({2, 2, 1});
  EXPECT_NO_THROW(require_valid(schedule));
  schedule.ranks[1].pop_back();
  EXPECT_THROW(require_valid(schedule), ConfigError);
}

}  // namespace
}  // namespace weft::schedule
