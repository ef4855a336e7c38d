// A product of Units whose gradients are known numbers, at every position of the dial; functions that throw.
#pragma once

#include <string>
#include <vector>

#include "tests/ranks/sharding/stack.h"

namespace weft::testing {

/// Elements of each parameter: over three ranks the last rank's shard is empty, over two they are unequal.
constexpr int64_t kElements = 40;

struct Dial {
  const char* name;
  int zero;
  bool reshard = true;
};
inline const std::vector<Dial> kDials{{"zero0", 0}, {"zero1", 1}, {"zero2", 2}, {"zero3", 3}, {"zero3_keep", 3, false}};

inline DataParallelOptions options_of(const Dial& dial, bool overlap = true) {
  return {.sharding = sharding_of_zero(dial.zero),
          .reshard_after_forward = dial.reshard,
          .bucket = {.bytes = 8, .last_bytes = 8},  // one parameter per group outside of Units
          .overlap = overlap};
}

/// Identity whose backward throws.
struct Bomb : torch::autograd::Function<Bomb> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*, torch::autograd::tensor_list) {
    throw std::runtime_error("bomb");
  }
};

/// x * w, w = 2, with a frozen parameter of ones, and one that is not used.
struct FactorImpl : torch::nn::Module {
  FactorImpl() {
    w = register_parameter("w", torch::full({kElements}, 2.0, torch::kDouble));
    fixed = register_parameter("fixed", torch::ones({kElements}, torch::kDouble), /*requires_grad=*/false);
    unused = register_parameter("unused", torch::ones({3}, torch::kDouble));
  }
  at::Tensor forward(const at::Tensor& x, bool throws) {
    if (throws) throw std::runtime_error("forward failed");
    return x * w * fixed;
  }
  at::Tensor w, fixed, unused;
};
TORCH_MODULE(Factor);

struct FactorsImpl : torch::nn::Module {
  FactorsImpl() {
    for (const char* name : {"a", "b", "c", "d"}) factors.push_back(register_module(name, Unit<Factor>()));
  }
  /// x a b c d, in `order`; with a bomb before the factor at place `bomb` (4: after the last one), so that the factors from there
  /// on have their gradients when it goes off. `fail`: place of the factor whose forward throws.
  at::Tensor forward(at::Tensor x, int bomb = -1, int fail = -1) {  // [kElements] -> [kElements]
    for (int i = 0; i < 4; ++i) {
      if (i == bomb) x = Bomb::apply(x);
      x = factors[static_cast<size_t>(order[static_cast<size_t>(i)])]->forward(x, i == fail);
    }
    return bomb == 4 ? Bomb::apply(x) : x;
  }
  std::vector<Unit<Factor>> factors;
  std::vector<int> order{0, 1, 2, 3};
};
TORCH_MODULE(Factors);

constexpr int kNowhere = -1;

/// Input rank + 1: the gradient of each w is 8 (rank + 1), the mean over ranks 4 (ranks + 1).
inline at::Tensor input_of(const World& world) {
  return torch::full({kElements}, world.rank() + 1.0, torch::kDouble).requires_grad_();
}
inline double mean_gradient(const World& world) { return 4.0 * (world.size() + 1); }

/// The loss whose gradient on this rank is 8 (rank + 1) under GradScale::mean_over_ranks.
inline at::Tensor factor_loss(Factors& net, const World& world, const DataParallel& dp, int bomb = kNowhere, int fail = kNowhere) {
  return scale_loss(net(input_of(world), bomb, fail).sum(), world.size(), dp);
}

/// Every w has this reduced gradient on the ranks that hold elements of it, everything unused none.
inline void expect_gradients(const DataParallel& dp, double value, const std::string& where) {
  for (const NamedTensor& shard : dp.shards()) {
    const at::Tensor grad = shard.tensor.grad();
    const bool used = shard.name.ends_with(".w");
    ASSERT_EQ(grad.defined(), used) << shard.name << ", " << where;
    if (!used) continue;
    EXPECT_TRUE(at::allclose(grad, at::full_like(grad, value), 1e-13, 0)) << shard.name << ", " << where << ": " << grad;
  }
}

/// No gradient is left anywhere.
inline void expect_no_gradients(const DataParallel& dp, const std::string& where) {
  for (const auto* list : {&dp.shards(), &dp.parameters()}) {
    for (const NamedTensor& t : *list) EXPECT_FALSE(t.tensor.grad().defined()) << t.name << ", " << where;
  }
}

/// A step without update, for the next backward to start from nothing.
inline void forget_step(DataParallel& dp) {
  dp.zero_grad();
  dp.continue_accumulation();
}

inline void expect_right_step(World& world, Factors& net, DataParallel& dp, const std::string& where) {
  forget_step(dp);
  factor_loss(net, world, dp).backward();
  expect_gradients(dp, mean_gradient(world), where + ", rank " + std::to_string(world.rank()));
}

}  // namespace weft::testing
