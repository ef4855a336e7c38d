// Faults in the communication under each position of the dial, and in how the engine uses it: parity must notice.
#include "tests/ranks/sharding/stack.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/tolerances.h"
#include "weft/core/error.h"

namespace weft {
namespace {

using testing::CommFault;
using testing::CommOps;
using testing::difference;
using testing::on_faulty_threads;
using testing::Trace;
using testing::train_stack;


struct InjectedFaultCase {
  const char* name;
  CommFault fault;
  CommOps where;
};

const std::vector<InjectedFaultCase> kInjectedFaults{
    {"missing_reduce", CommFault::missing_reduce, CommOps::reductions},
    {"double_count", CommFault::double_count, CommOps::reductions},
    {"wrong_scale", CommFault::wrong_scale, CommOps::reductions},
    {"wrong_rank_order", CommFault::wrong_rank_order, CommOps::reductions},
    {"buffer_reused_early", CommFault::buffer_reused_early, CommOps::reductions},
    {"dropped_rank", CommFault::dropped_rank, CommOps::reductions},
    {"missing_gather", CommFault::missing_reduce, CommOps::gathers},
    {"gather_wrong_scale", CommFault::wrong_scale, CommOps::gathers},
    {"gather_wrong_rank_order", CommFault::wrong_rank_order, CommOps::gathers},
    {"gather_of_a_reused_buffer", CommFault::buffer_reused_early, CommOps::gathers},
    {"gather_without_a_rank", CommFault::dropped_rank, CommOps::gathers},
};

class InjectedCommFault : public ::testing::TestWithParam<std::tuple<int, InjectedFaultCase>> {};

TEST_P(InjectedCommFault, IsCaughtByParity) {
  const auto& [zero, test] = GetParam();
  testing::StackSetting setting{.steps = 6};
  const Trace reference = train_stack(Comm(), setting);
  setting.options.sharding = sharding_of_zero(zero);
  for (const int ranks : {2, 3}) {
    try {
      on_faulty_threads(ranks, test.fault, [&](World& world) {
        Trace trace = train_stack(world.comm(), setting);
        trace.gradients = reference.gradients;  // they were brought together through the fault
        EXPECT_GT(difference(trace, reference), testing::kFaultSeen) << ranks << " ranks";
      }, test.where);
    } catch (const Error& error) {
      // The engine itself notices when its entries in the vote come back in another place.
      EXPECT_EQ(test.fault, CommFault::wrong_rank_order) << error.what();
      EXPECT_EQ(test.where, CommOps::reductions) << error.what();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Faults, InjectedCommFault, ::testing::Combine(::testing::Values(1, 2, 3), ::testing::ValuesIn(kInjectedFaults)),
                         [](const auto& info) { return "zero" + std::to_string(std::get<0>(info.param)) + "_" + std::get<1>(info.param).name; });

TEST(InjectedCommFault, NoneLeavesParity) {
  testing::StackSetting setting{.steps = 6};
  const Trace reference = train_stack(Comm(), setting);
  for (const int zero : {1, 2, 3}) {
    setting.options.sharding = sharding_of_zero(zero);
    for (const int ranks : {2, 3}) {
      on_faulty_threads(ranks, CommFault::none, [&](World& world) {
        EXPECT_LE(difference(train_stack(world.comm(), setting), reference), testing::kFp64Parity) << "zero " << zero << ", " << ranks << " ranks";
      });
    }
  }
}

}  // namespace
}  // namespace weft
