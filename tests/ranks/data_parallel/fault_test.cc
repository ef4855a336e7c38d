// Faults that parity must catch, each injected where a wrong engine or back end would have it: in the communication itself.
#include "tests/support/faulty_backend.h"
#include "tests/support/problem.h"
#include "tests/support/tolerances.h"
#include "weft/core/error.h"

namespace weft {
namespace {

using testing::CommFault;
using testing::difference;
using testing::on_faulty_threads;
using testing::Trace;
using testing::train;


struct Case {
  const char* name;
  CommFault fault;
};

class InjectedFault : public ::testing::TestWithParam<Case> {};

// The check of DataParallelParity.EqualsOneRank, on a back end with the fault.
TEST_P(InjectedFault, IsCaughtByParity) {
  const Trace reference = train(Comm(), {});
  for (const int ranks : {2, 3}) {
    try {
      on_faulty_threads(ranks, GetParam().fault, [&](World& world) {
        EXPECT_GT(difference(train(world.comm(), {}), reference), testing::kFaultSeen) << ranks << " ranks";
      });
    } catch (const Error& e) {
      // The engine itself notices when its own entries in a bucket come back in another place.
      EXPECT_EQ(GetParam().fault, CommFault::wrong_rank_order) << e.what();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Faults, InjectedFault,
                         ::testing::Values(Case{"missing_reduce", CommFault::missing_reduce},
                                           Case{"double_count", CommFault::double_count},
                                           Case{"wrong_scale", CommFault::wrong_scale},
                                           Case{"wrong_rank_order", CommFault::wrong_rank_order},
                                           Case{"buffer_reused_early", CommFault::buffer_reused_early},
                                           Case{"dropped_rank", CommFault::dropped_rank}),
                         [](const auto& info) { return info.param.name; });

TEST(InjectedFault, NoneLeavesParity) {
  const Trace reference = train(Comm(), {});
  for (const int ranks : {2, 3}) {
    on_faulty_threads(ranks, CommFault::none, [&](World& world) {
      EXPECT_LE(difference(train(world.comm(), {}), reference), testing::kFp64Parity) << ranks << " ranks";
    });
  }
}

// Faults of what the program around the engine does.
TEST(InjectedFault, DroppedMicroBatchIsCaughtByParity) {
  const Trace reference = train(Comm(), {.micro_steps = 2});
  testing::on_threads(2, [&](World& world) {
    // Rank 1 loses its rows of each micro-batch.
    EXPECT_GT(difference(train(world.comm(), {.micro_steps = 2, .rows = {3, 0}}), reference), testing::kFaultSeen);
  });
}

TEST(InjectedFault, TiedGradientCountedOnceIsCaughtByParity) {
  const Trace reference = train(Comm(), {});
  const auto halve = [](DataParallel&, testing::Net& net) {
    const at::NoGradGuard no_grad;
    net->shared.mutable_grad().mul_(0.5);
  };
  testing::on_threads(2, [&](World& world) {
    EXPECT_GT(difference(train(world.comm(), {.fault = halve}), reference), testing::kFaultSeen);
  });
}

}  // namespace
}  // namespace weft
