// A small regression problem whose one-rank solution every layout must reproduce.
#pragma once

#include <functional>
#include <vector>

#include "tests/support/ranks.h"
#include "tests/support/test_pch.h"
#include "weft/parallel/data_parallel.h"

namespace weft::testing {

/// Two layers, a bias, a parameter used twice (`shared`), and a scalar: enough for several buckets of odd sizes.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(7);
    first = register_module("first", torch::nn::Linear(6, 17));
    second = register_module("second", torch::nn::Linear(17, 3));
    shared = register_parameter("shared", torch::randn({17, 17}) * 0.1);
    scale = register_parameter("scale", torch::ones({}));
  }
  at::Tensor forward(const at::Tensor& x) {  // [B, 6] -> [B, 3]
    at::Tensor h = torch::tanh(first(x));
    h = torch::tanh(torch::matmul(h, shared));
    h = torch::matmul(h, shared);
    return second(h) * scale;
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  at::Tensor shared, scale;
};
TORCH_MODULE(Net);

/// A Net with the same weights at every call. Ranks that are threads share the default generator, so that seeding and drawing
/// must not interleave: make it with this, not with Net().
Net make_net();

/// Everything that a training run shows: losses, every gradient of the last step, the weights after it.
struct Trace {
  std::vector<double> losses;
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> weights;
};

struct Setting {
  int64_t steps = 20;
  int64_t global_batch = 12;
  int64_t micro_steps = 1;
  at::ScalarType dtype = at::kDouble;
  bool adam = true;
  DataParallelOptions options;
  /// Rows of each rank; empty: equal parts. They sum to global_batch / micro_steps.
  std::vector<int64_t> rows;
  /// A test-only fault, called after the last backward of every step and before the update.
  std::function<void(DataParallel&, Net&)> fault;
};

/// Trains on the ranks of `comm`; every rank returns the global loss and the same gradients and weights.
Trace train(const Comm& comm, const Setting& setting);

/// Largest relative difference: max|a-b| / max(max|b|, 1e-6 x largest gradient norm), over
/// losses, gradients and weights. NaN counts as infinite. Fails the test if the reference does not move.
double difference(const Trace& trace, const Trace& reference);

}  // namespace weft::testing
