// Described modules: files, memory by stage, time by term, the search.
#include <gtest/gtest.h>

#include "weft/core/error.h"
#include "weft/plan/program.h"

namespace weft::plan {
namespace {

ProgramJob program_job(int64_t devices, int64_t batch) {
  ProgramJob job;
  job.spec = {.name = "net", .samples = 4, .element = 4, .parameters = 1e9, .trainable = 9e8, .largest_unit = 1e8, .forward_flops = 1e13, .backward_flops = 2e13, .saved_bytes = 4e9, .peak_bytes = 5e9, .moved_bytes = 2e10, .kernels = 500};
  job.machine = machine::Machine::of("h100");
  job.devices = devices;
  job.global_batch = batch;
  return job;
}

TEST(Program, FileReadsBack) {
  const ProgramSpec spec = program_job(1, 1).spec, again = program_from_json(to_json(spec), "test");
  EXPECT_EQ(to_json(again), to_json(spec));
  EXPECT_THROW(program_from_json(Json::object(), "test"), ConfigError);
}

TEST(Program, StatesAndActivationsFollowStageAndMicroBatch) {
  ProgramJob job = program_job(8, 64);
  job.zero = 1, job.micro_batch = 8;
  const ProgramEstimate one = estimate(job, {});
  EXPECT_DOUBLE_EQ(one.memory.weights, 4e9);
  EXPECT_DOUBLE_EQ(one.memory.gradients, 4 * 9e8);
  EXPECT_DOUBLE_EQ(one.memory.optimizer, 8 * 9e8 / 8);
  EXPECT_DOUBLE_EQ(one.memory.activations, 2 * 4e9);
  EXPECT_DOUBLE_EQ(one.memory.transient, 2 * 1e9 + 4 * 1e8);
  job.precision = machine::Precision::bf16;
  EXPECT_DOUBLE_EQ(estimate(job, {}).memory.activations, 4e9);
  job.zero = 3;
  const ProgramEstimate three = estimate(job, {});
  EXPECT_DOUBLE_EQ(three.memory.weights, 2e9 / 8);
  EXPECT_DOUBLE_EQ(three.memory.transient, 1e9 + 2 * 1e8 + (2 * 2 + 4) * 1e8);
  EXPECT_GT(three.time.dp, 0);
  EXPECT_NEAR(three.time.step, three.time.gemm + three.time.memory + three.time.dp + three.time.optimizer + three.time.fixed, 1e-12);
}

TEST(Program, SearchDividesOnlyWhatItMust) {
  ProgramJob job = program_job(8, 64);
  EXPECT_LE(search(job, {}).ranked.front().job.zero, 1);  // the same traffic
  EXPECT_TRUE(search(job, {}).rejected.empty());
  job.spec.parameters = job.spec.trainable = 8e9;  // 128 GB of states
  const ProgramPlan plan = search(job, {});
  EXPECT_GE(plan.ranked.front().job.zero, 1);
  ASSERT_FALSE(plan.rejected.empty());
  EXPECT_EQ(plan.rejected.front().job.zero, 0);
  job.spec.saved_bytes = job.spec.peak_bytes = 1e13;
  EXPECT_TRUE(search(job, {}).ranked.empty());
}

}  // namespace
}  // namespace weft::plan
