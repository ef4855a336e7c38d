// The parity matrix: every dial position x precision x accumulation x ranks, against one rank.
#pragma once

#include <string>

#include "tests/ranks/sharding/factors.h"
#include "tests/support/pairwise.h"
#include "tests/support/tolerances.h"

namespace weft::testing {

struct Precision {
  const char* name;
  at::ScalarType dtype;
};
inline const std::vector<Precision> kPrecisions{{"fp64", at::kDouble}, {"fp32", at::kFloat}, {"bf16", at::kBFloat16}, {"fp16", at::kHalf}};
inline const std::vector<int64_t> kMicroSteps{1, 4};
inline const std::vector<int> kRankCounts{2, 3, 4};

/// Values per axis, in the order of a cell's indices.
inline std::vector<size_t> matrix_sizes() { return {kDials.size(), kPrecisions.size(), kMicroSteps.size(), kRankCounts.size()}; }

using MatrixCell = std::vector<size_t>;

inline std::string name_of_cell(const ::testing::TestParamInfo<MatrixCell>& info) {
  const MatrixCell& c = info.param;
  return std::string(kDials[c[0]].name) + "_" + kPrecisions[c[1]].name + "_" + std::to_string(kMicroSteps[c[2]]) + "micro_" +
         std::to_string(kRankCounts[c[3]]) + "ranks";
}

/// Largest relative difference of one part of the traces.
inline double loss_difference(const Trace& trace, const Trace& reference) {
  Trace other = reference;
  other.losses = trace.losses;
  return difference(other, reference);
}
inline double gradient_difference(const Trace& trace, const Trace& reference) {
  Trace other = reference;
  other.gradients = trace.gradients;
  return difference(other, reference);
}
inline double weight_difference(const Trace& trace, const Trace& reference) {
  Trace other = reference;
  other.weights = trace.weights;
  return difference(other, reference);
}

// Bounds of issue and style: fp64 hides no bug behind rounding; 16-bit runs may be off by twice what one rank is off.
constexpr double kFp32Tensors = 2e-4;  // after 20 AdamW steps, which divide by square roots of small second moments
constexpr double kTwice = 2;

/// Trains the cell and compares it with one rank: losses, weights after 20 steps, and a step's norm and gradients: the last in fp64 and
/// fp32. In 16 bits the first: after 19 steps of rounding gradients belong to other weights, and near the minimum they are small.
inline void expect_parity(const MatrixCell& cell) {
  const Dial& dial = kDials[cell[0]];
  const at::ScalarType dtype = kPrecisions[cell[1]].dtype;
  const bool low = c10::isReducedFloatingType(dtype);
  StackSetting setting{.micro_steps = kMicroSteps[cell[2]], .steps = 20, .batch = 48, .dtype = dtype};
  if (low) setting.options.gradient_dtype = at::kFloat;
  if (low) setting.gradient_step = 0;
  const Trace reference = train_stack(Comm(), setting);
  StackSetting in_fp64{.micro_steps = setting.micro_steps, .steps = 20, .gradient_step = setting.gradient_step, .batch = 48};
  const Trace exact = low ? train_stack(Comm(), in_fp64) : reference;
  setting.options.sharding = sharding_of_zero(dial.zero);
  setting.options.reshard_after_forward = dial.reshard;
  setting.options.bucket = {.bytes = 1200, .last_bytes = 200};
  on_threads(kRankCounts[cell[3]], [&](World& world) {
    const Trace trace = train_stack(world.comm(), setting);
    ASSERT_EQ(trace.gradients.size(), reference.gradients.size());
    if (dtype == at::kDouble) {
      EXPECT_LE(difference(trace, reference), kFp64Parity);
    } else if (dtype == at::kFloat) {
      EXPECT_LE(loss_difference(trace, reference), kFp32Losses);
      EXPECT_LE(difference(trace, reference), kFp32Tensors);
    } else {
      EXPECT_LE(loss_difference(trace, exact), kTwice * loss_difference(reference, exact)) << "losses";
      EXPECT_LE(gradient_difference(trace, exact), kTwice * gradient_difference(reference, exact)) << "gradients";
      EXPECT_GT(gradient_difference(reference, exact), 0);
      EXPECT_LE(weight_difference(trace, exact), kTwice * weight_difference(reference, exact)) << "weights";
    }
  });
}

}  // namespace weft::testing
