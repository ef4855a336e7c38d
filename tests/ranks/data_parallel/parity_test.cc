// Data parallelism gives one rank's numbers: every count of ranks, accumulation, uneven parts, bucket size, precision.
#include "tests/support/problem.h"
#include "tests/support/tolerances.h"

namespace weft {
namespace {

using testing::difference;
using testing::on_threads;
using testing::Setting;
using testing::Trace;
using testing::train;

constexpr double kFloat = 2e-5;    // weights after 20 AdamW steps; losses alone stay within 1e-5

struct Cell {
  int ranks;
  int64_t micro_steps;
  bool adam;
  std::vector<int64_t> rows;
};

std::string name_of(const ::testing::TestParamInfo<Cell>& info) {
  const Cell& cell = info.param;
  std::string name = std::to_string(cell.ranks) + "ranks_" + std::to_string(cell.micro_steps) + (cell.adam ? "micro_adamw" : "micro_sgd");
  for (const int64_t rows : cell.rows) name += "_" + std::to_string(rows);
  return name;
}

class DataParallelParity : public ::testing::TestWithParam<Cell> {};

TEST_P(DataParallelParity, EqualsOneRank) {
  const Cell cell = GetParam();
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    Setting setting{.micro_steps = cell.micro_steps, .dtype = dtype, .adam = cell.adam};
    const Trace reference = train(Comm(), setting);
    setting.rows = cell.rows;
    on_threads(cell.ranks, [&](World& world) {
      EXPECT_LE(difference(train(world.comm(), setting), reference), dtype == at::kDouble ? testing::kFp64Parity : kFloat);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Cells, DataParallelParity,
                         ::testing::Values(Cell{1, 1, true, {}}, Cell{2, 1, true, {}}, Cell{3, 1, false, {}},
                                           Cell{4, 1, true, {}}, Cell{2, 2, false, {}}, Cell{3, 4, true, {1, 1, 1}},
                                           Cell{3, 1, true, {1, 9, 2}}, Cell{4, 2, true, {3, 0, 1, 2}},
                                           Cell{2, 1, false, {12, 0}}),
                         name_of);

TEST(DataParallelBits, OverlapAndBucketSizesDoNotChangeTheResult) {
  std::vector<DataParallelOptions> variants(4);
  variants[1].overlap = false;
  variants[2].bucket = {.bytes = 64, .last_bytes = 8};  // one parameter per bucket
  variants[3].bucket = {.bytes = 1 << 30, .last_bytes = 1 << 30};
  on_threads(3, [&](World& world) {
    const Trace first = train(world.comm(), {.dtype = at::kFloat});
    for (const auto& options : variants) {
      const Trace other = train(world.comm(), {.dtype = at::kFloat, .options = options});
      EXPECT_EQ(other.losses, first.losses);
      for (size_t i = 0; i < first.weights.size(); ++i) EXPECT_TRUE(at::equal(other.weights[i], first.weights[i]));
    }
  });
}

TEST(DataParallelBits, GradScaleSumEqualsMean) {
  // With scale_loss both policies promise the gradient of the global mean.
  const Trace reference = train(Comm(), {});
  on_threads(3, [&](World& world) {
    EXPECT_LE(difference(train(world.comm(), {.options = {.grad_scale = GradScale::sum}}), reference), testing::kFp64Parity);
  });
}

TEST(DataParallelBits, GradientsKeptInAnotherDtype) {
  const Trace reference = train(Comm(), {});
  on_threads(2, [&](World& world) {
    const double worst = difference(train(world.comm(), {.options = {.gradient_dtype = at::kFloat}}), reference);
    EXPECT_LE(worst, 1e-4);
    EXPECT_GT(worst, 1e-13) << "gradients were not kept in fp32";
  });
}

// The same from real processes, on both back ends.
const testing::RankBody kTrain("data_parallel.train", [](World& world, const std::string& argument) -> std::string {
  const Trace trace = train(world.comm(), {.rows = argument == "uneven" ? std::vector<int64_t>{5, 1, 6} : std::vector<int64_t>{}});
  const Trace reference = train(Comm(), {});
  return std::to_string(difference(trace, reference) * 1e12);
});

TEST(DataParallelProcesses, EqualOneRankOnLocalAndGloo) {
  for (const std::string backend : {"local", "gloo"}) {
    for (const auto& [ranks, argument] : std::vector<std::pair<int, std::string>>{{2, ""}, {3, "uneven"}}) {
      for (const auto& result : testing::on_processes(ranks, "data_parallel.train", argument, backend)) {
        ASSERT_EQ(result.exit_code, 0) << result.result;
        EXPECT_LE(std::stod(result.result) * 1e-12, testing::kFp64Parity) << backend << ", " << ranks << " ranks";
      }
    }
  }
}

}  // namespace
}  // namespace weft
