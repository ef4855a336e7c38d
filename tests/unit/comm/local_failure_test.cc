// How failures spread in the local back end, with ranks as threads; and the life of shared blocks. Free of torch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <latch>

#include "tests/unit/comm/local_stress.h"
#include "weft/comm/local/patience.h"

namespace weft::local {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr milliseconds kShort{300};  // deadlines that are meant to pass

std::shared_ptr<Op> make(Call call, std::vector<float>& data, milliseconds timeout = stress::kDeadline) {
  auto op = std::make_shared<Op>();
  op->call = call;
  op->dtype = Dtype::f32;
  if (call == Call::all_reduce) op->reduction = Reduce::sum;
  op->count = data.size();
  op->bytes = data.size() * sizeof(float);
  op->input = op->output = reinterpret_cast<char*>(data.data());
  op->timeout = timeout;
  return op;
}

/// Runs fn on every rank and returns what each threw (rank -1: nothing). A rank that failed stays until all are done.
std::vector<CommFailure> failures(int n, const std::function<void(Engine&)>& fn) {
  auto engines = Engine::in_process(n);
  std::vector<CommFailure> result(static_cast<size_t>(n));
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r) {
    threads.emplace_back([&, r] {
      try {
        fn(*engines[static_cast<size_t>(r)]);
      } catch (const CommError& error) {
        result[static_cast<size_t>(r)] = error.failure();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return result;
}

std::vector<int> all_ranks(const Engine& engine) {
  std::vector<int> ranks;
  for (int r = 0; r < engine.size(); ++r) ranks.push_back(r);
  return ranks;
}

TEST(LocalFailure, DifferentSizesNameBothRanks) {
  const auto result = failures(2, [](Engine& engine) {
    auto group = engine.create_group(all_ranks(engine), "dp", stress::kDeadline);
    std::vector<float> data(engine.rank() == 0 ? 10 : 11);
    auto op = make(Call::all_reduce, data);
    engine.start(group->collectives(), op);
    engine.wait(*op, Until::complete, {});
  });
  for (const CommFailure& failure : result) {
    EXPECT_THAT(failure.peers, ElementsAre(0, 1));
    EXPECT_EQ(failure.group, "dp");
    EXPECT_EQ(failure.op, "all_reduce");
    EXPECT_EQ(failure.sequence, 0u);
    EXPECT_THAT(failure.cause, HasSubstr("10 x fp32"));
    EXPECT_THAT(failure.cause, HasSubstr("11 x fp32"));
  }
}

TEST(LocalFailure, DifferentCallsNameBothRanks) {
  const auto result = failures(2, [](Engine& engine) {
    auto group = engine.create_group(all_ranks(engine), "dp", stress::kDeadline);
    std::vector<float> data(4), out(8);
    auto op = make(engine.rank() == 0 ? Call::all_reduce : Call::all_gather, data);
    if (engine.rank() == 1) op->output = reinterpret_cast<char*>(out.data());
    engine.start(group->collectives(), op);
    engine.wait(*op, Until::complete, {});
  });
  for (const CommFailure& failure : result) {
    EXPECT_THAT(failure.cause, HasSubstr("all_reduce(4 x fp32, sum)"));
    EXPECT_THAT(failure.cause, HasSubstr("all_gather(4 x fp32)"));
  }
}

// Rank 1 never comes to its group with 2; rank 0 waits for 2. Both must name 1.
TEST(LocalFailure, DeadlineNamesWhoHoldsUpNotWhoIsHeldUp) {
  const auto result = failures(3, [](Engine& engine) {
    auto world = engine.create_group(all_ranks(engine), "world", stress::kDeadline);
    std::shared_ptr<Group> pair;
    if (engine.rank() > 0) pair = engine.create_group({1, 2}, "pair", stress::kDeadline);
    std::vector<float> data(4);
    if (engine.rank() == 1) return;
    if (engine.rank() == 2) {
      auto op = make(Call::all_reduce, data, kShort);
      engine.start(pair->collectives(), op);
      engine.wait(*op, Until::complete, {});
    } else {
      auto op = make(Call::message, data, kShort);
      engine.start(world->incoming(2), op);
      engine.wait(*op, Until::complete, {});
    }
  });
  for (int r : {0, 2}) {
    const CommFailure& failure = result[static_cast<size_t>(r)];
    EXPECT_THAT(failure.peers, ElementsAre(1)) << "rank " << r << ": " << failure.cause;
    EXPECT_THAT(failure.cause, HasSubstr("within the deadline of 0.3 s"));
    EXPECT_GE(failure.elapsed.count(), 0);
  }
}

TEST(LocalFailure, RanksThatWaitForEachOtherAreToldSo) {
  const auto result = failures(2, [](Engine& engine) {
    auto group = engine.create_group(all_ranks(engine), "world", stress::kDeadline);
    std::vector<float> data(4);
    auto op = make(Call::message, data, kShort);
    engine.start(group->incoming(1 - engine.rank()), op);
    engine.wait(*op, Until::complete, {});
  });
  for (const CommFailure& failure : result) {
    EXPECT_THAT(failure.cause, HasSubstr("wait for each other"));
    EXPECT_THAT(failure.cause, HasSubstr("recv #0"));
  }
}

TEST(LocalFailure, AnAbortEndsWaitsInEveryGroupAndLaterCalls) {
  const auto result = failures(3, [](Engine& engine) {
    auto world = engine.create_group(all_ranks(engine), "world", stress::kDeadline);
    std::shared_ptr<Group> pair;
    if (engine.rank() > 0) pair = engine.create_group({1, 2}, "pair", stress::kDeadline);
    std::vector<float> data(100'000);
    if (engine.rank() == 2) {
      std::this_thread::sleep_for(milliseconds(20));  // the others are likely to sleep by now; the test does not depend on it
      engine.abort(RankSet().set(2), "loss is NaN");
      engine.abort(RankSet().set(2), "a second reason");
    }
    auto op = make(Call::all_reduce, data);
    try {
      Lane& lane = engine.rank() == 1 ? pair->collectives() : world->collectives();
      engine.start(lane, op);
      engine.wait(*op, Until::complete, {});
      ADD_FAILURE() << "the call must fail";
    } catch (const CommError& error) {
      EXPECT_EQ(error.failure().cause, "loss is NaN");
    }
    auto again = make(Call::all_reduce, data);
    engine.start(world->collectives(), again);
  });
  for (const CommFailure& failure : result) {
    EXPECT_EQ(failure.cause, "loss is NaN");
    EXPECT_THAT(failure.peers, ElementsAre(2));
  }
}

TEST(LocalFailure, ARankThatLeftIsNamedOnlyByWhoNeedsIt) {
  auto engines = Engine::in_process(3);
  std::vector<std::thread> threads;
  std::string cause;
  std::latch pair_is_done(2);  // rank 0's failure would end a call that rank 1 has not seen the end of
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      auto engine = std::move(engines[static_cast<size_t>(r)]);
      auto world = engine->create_group({0, 1, 2}, "world", stress::kDeadline);
      if (r == 2) return;  // leaves in order
      std::vector<float> data(50'000, 1.0f);
      auto pair = engine->create_group({0, 1}, "pair", stress::kDeadline);
      auto op = make(Call::all_reduce, data);
      engine->start(pair->collectives(), op);
      engine->wait(*op, Until::complete, {});
      EXPECT_EQ(data[49'999], 2.0f);
      pair_is_done.arrive_and_wait();
      if (r == 1) return;
      auto needs_it = make(Call::message, data);
      engine->start(world->incoming(2), needs_it);
      try {
        engine->wait(*needs_it, Until::complete, {});
      } catch (const CommError& error) {
        cause = error.failure().cause;
        EXPECT_THAT(error.failure().peers, ElementsAre(2));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_THAT(cause, HasSubstr("rank 2 left the world"));
}

// One thread plays both ranks. Rank 1's part of the call is there before it fails the world; rank 0 looks only afterwards.
TEST(LocalFailure, ACallIsDoneIfAllDidTheirPartBeforeTheWorldFailed) {
  const auto engines = Engine::in_process(2);
  std::vector<std::shared_ptr<Group>> groups;
  for (const auto& engine : engines) groups.push_back(engine->create_group({0, 1}, "pair", stress::kDeadline));
  std::vector<float> carried(8, 1.0f), other_carried(8, 1.0f);
  auto first = make(Call::all_reduce, carried), others = make(Call::all_reduce, other_carried);
  engines[0]->start(groups[0]->collectives(), first);
  engines[1]->start(groups[1]->collectives(), others);
  engines[1]->abort(RankSet().set(1), "bad batch");
  engines[0]->wait(*first, Until::complete, {});
  EXPECT_EQ(carried[7], 2.0f);
}

// Not so when a member's own memory is read: that member may have taken it back while it unwound.
TEST(LocalFailure, MemoryOfARankThatFailedIsNotTakenForAResult) {
  constexpr size_t kCount = 10'000;  // too many to be carried in the descriptor
  const auto engines = Engine::in_process(2);
  std::vector<std::shared_ptr<Group>> groups;
  for (const auto& engine : engines) groups.push_back(engine->create_group({0, 1}, "pair", stress::kDeadline));
  std::vector<float> own(kCount, 1.0f), gathered(2 * kCount), others_gathered(2 * kCount);
  auto first = make(Call::all_gather, own);
  first->output = reinterpret_cast<char*>(gathered.data());
  std::vector<std::shared_ptr<SharedBlock>> blocks;
  for (size_t r : {0U, 1U}) blocks.push_back(engines[r]->allocate(*groups[r], kCount * sizeof(float), stress::kDeadline));
  auto others = make(Call::all_gather, own);
  others->input = blocks[1]->mine;
  others->output = reinterpret_cast<char*>(others_gathered.data());
  engines[0]->start(groups[0]->collectives(), first);
  engines[1]->start(groups[1]->collectives(), others);
  engines[1]->abort(RankSet().set(1), "bad batch");
  EXPECT_THROW(engines[0]->wait(*first, Until::complete, {}), CommError);
}

// A rank reads that the world failed, or that a peer ended, and only then finds that its call is done: it is done.
TEST(LocalFailure, WhatAPeerDidBeforeItEndedCounts) {
  auto engines = Engine::in_process(3);
  const CallName name{"all_reduce", "world", 0};
  Patience patience(*engines[0], name, stress::kDeadline, std::chrono::steady_clock::now());
  using HeldUp = std::optional<Patience::HeldUp>;
  std::vector<HeldUp> answers;
  size_t asked = 0;
  const auto advance = [&] { return answers[asked++]; };
  const HeldUp by_one = Patience::HeldUp{.missing = RankSet().set(1), .arrival = true};
  const HeldUp by_two = Patience::HeldUp{.missing = RankSet().set(2), .arrival = true};

  engines[1].reset();  // leaves in order
  answers = {by_one, std::nullopt};
  EXPECT_NO_THROW(patience.check(advance)) << "rank 1 had done its part";
  asked = 0;
  answers = {by_one, by_two};
  EXPECT_NO_THROW(patience.check(advance)) << "rank 1 had done its part; rank 2 is waited for";

  engines[2]->abort(RankSet().set(2), "bad batch");
  asked = 0;
  answers = {by_two, std::nullopt};
  EXPECT_NO_THROW(patience.check(advance));
  asked = 0;
  answers = {by_two, by_two};
  EXPECT_THROW(patience.check(advance), CommError);
}

// Each rank waits for its call `first` before it makes its call `second`: two groups in opposite orders, or a ring in which each
// rank waits for the next. If rank 0 did not give way, nobody would ever move.
TEST(LocalNeeded, ARankThatPeersWaitForGivesWay) {
  for (const int n : {2, 3}) {
    const auto result = failures(n, [n](Engine& engine) {
      std::vector<std::shared_ptr<Group>> pairs;  // of rank r and the next
      for (int r = 0; r < n; ++r) {
        const int next = (r + 1) % n;
        const bool member = engine.rank() == r || engine.rank() == next;
        pairs.push_back(member ? engine.create_group({r, next}, "pair" + std::to_string(r), stress::kDeadline) : nullptr);
      }
      const auto mine = static_cast<size_t>(engine.rank()), before = static_cast<size_t>((engine.rank() + n - 1) % n);
      std::vector<float> data(4), more(4);
      auto first = make(Call::all_reduce, data), second = make(Call::all_reduce, more);
      engine.start(pairs[mine]->collectives(), first);
      if (engine.rank() == 0) {
        EXPECT_FALSE(engine.wait_unless_needed(*first)) << n << " ranks";
      } else {
        engine.wait(*first, Until::complete, {});
      }
      engine.start(pairs[before]->collectives(), second);
      for (Op* op : {first.get(), second.get()}) engine.wait(*op, Until::released, {});
      EXPECT_TRUE(engine.wait_unless_needed(*first));
    });
    for (const CommFailure& failure : result) EXPECT_EQ(failure.rank, -1) << failure.cause;
  }
}

// All make their calls in one order: a rank that is ahead in it waits, however far the third one is.
TEST(LocalNeeded, ARankThatIsAheadWaits) {
  const auto result = failures(3, [](Engine& engine) {
    auto one = engine.create_group(all_ranks(engine), "one", stress::kDeadline);
    auto other = engine.create_group(all_ranks(engine), "other", stress::kDeadline);
    std::vector<float> data(4), more(4);
    for (int i = 0; i < 200; ++i) {
      auto first = make(Call::all_reduce, data), second = make(Call::all_reduce, more);
      engine.start(one->collectives(), first);
      if (engine.rank() == i % 3) {
        EXPECT_TRUE(engine.wait_unless_needed(*first));
      }
      engine.start(other->collectives(), second);
      for (Op* op : {first.get(), second.get()}) engine.wait(*op, Until::released, {});
    }
  });
  for (const CommFailure& failure : result) EXPECT_EQ(failure.rank, -1) << failure.cause;
}

TEST(LocalNeeded, AnAbortEndsTheWait) {
  const auto result = failures(2, [](Engine& engine) {
    auto group = engine.create_group(all_ranks(engine), "world", stress::kDeadline);
    if (engine.rank() == 1) return engine.abort(RankSet().set(1), "bad batch");
    std::vector<float> data(4);
    auto op = make(Call::all_reduce, data);
    engine.start(group->collectives(), op);
    (void)engine.wait_unless_needed(*op);
    ADD_FAILURE() << "rank 1 never came";
  });
  EXPECT_THAT(result[0].cause, HasSubstr("bad batch"));
  EXPECT_THAT(result[0].peers, ElementsAre(1));
}

TEST(LocalBlocks, AreUnmappedOnceAllHaveReleasedThem) {
  stress::on_threads(3, [](Engine& engine) {
    auto group = engine.create_group(all_ranks(engine), "world", stress::kDeadline);
    std::vector<std::shared_ptr<SharedBlock>> blocks;
    for (int i = 0; i < 4; ++i) blocks.push_back(engine.allocate(*group, 100'000, stress::kDeadline));
    blocks[0]->mine[99'999] = 1;
    EXPECT_EQ(engine.blocks().find(blocks[1]->mine + 5, 99'000), blocks[1].get());
    EXPECT_EQ(engine.blocks().find(blocks[1]->mine + 5, 200'000), nullptr);
    for (auto& block : blocks) block->release();
    std::vector<float> data(1);
    for (int i = 0; i < 2; ++i) {  // the second call starts after all have released
      auto op = make(Call::all_reduce, data);
      engine.start(group->collectives(), op);
      engine.wait(*op, Until::complete, {});
    }
    EXPECT_EQ(engine.blocks().count(), 0u);
  });
}

TEST(LocalBlocks, DifferentSizesAndTooMuchMemoryAreErrors) {
  const auto result = failures(2, [](Engine& engine) {
    auto group = engine.create_group(all_ranks(engine), "world", stress::kDeadline);
    EXPECT_THROW((void)engine.allocate(*group, size_t{1} << 44, stress::kDeadline), ConfigError);  // 16 TiB
    (void)engine.allocate(*group, engine.rank() == 0 ? 1000 : 2000, stress::kDeadline);
    // Rank 0 does not wait for the others to map it; it learns of the difference in its next call.
    std::vector<float> data(1);
    auto op = make(Call::all_reduce, data);
    engine.start(group->collectives(), op);
    engine.wait(*op, Until::complete, {});
  });
  for (const CommFailure& failure : result) EXPECT_THAT(failure.cause, HasSubstr("allocates 2000 bytes, rank 0 allocates 1000"));
}

}  // namespace
}  // namespace weft::local
