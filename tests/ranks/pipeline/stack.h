// A small model over pipeline stages, and the plain libtorch loop whose numbers every schedule must reproduce.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/sgd.h>

#include "tests/support/ranks.h"
#include "tests/support/test_pch.h"
#include "tests/support/tolerances.h"
#include "weft/nn/split.h"
#include "weft/nn/unit.h"
#include "weft/parallel/pipeline/cut.h"
#include "weft/parallel/pipeline/pipeline.h"

namespace weft::testing {

constexpr int64_t kPipeWidth = 7, kPipeRows = 24;

struct PipeCellImpl : torch::nn::Module {
  PipeCellImpl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kPipeWidth})));
    up = register_module("up", Split<torch::nn::Linear>(kPipeWidth, 11));
    down = register_module("down", Split<torch::nn::Linear>(11, kPipeWidth));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::tanh(up(norm(x)))); }
  torch::nn::LayerNorm norm{nullptr};
  Split<torch::nn::Linear> up{nullptr}, down{nullptr};
};
TORCH_MODULE(PipeCell);

/// tied: the last module's weight is the first's, used the other way round.
struct TiedHeadImpl : torch::nn::Module {
  explicit TiedHeadImpl(const at::Tensor& table) { weight = register_parameter("weight", table); }
  at::Tensor forward(const at::Tensor& x) { return torch::matmul(x, weight.t()); }
  at::Tensor weight;
};
TORCH_MODULE(TiedHead);
struct TiedTableImpl : torch::nn::Module {
  TiedTableImpl() { weight = register_parameter("weight", torch::randn({9, kPipeWidth}) * 0.3); }
  at::Tensor forward(const at::Tensor& tokens) { return torch::embedding(weight, tokens); }
  at::Tensor weight;
};
TORCH_MODULE(TiedTable);

enum class PipeModel { linear, tied };

inline torch::nn::Sequential pipe_model(int64_t cells, PipeModel kind) {
  static std::mutex generator;  // the default generator is every thread's
  const std::lock_guard lock(generator);
  torch::manual_seed(7);
  torch::nn::Sequential net;
  if (kind == PipeModel::tied) {
    TiedTable table;
    net->push_back(table);
    for (int64_t i = 0; i < cells; ++i) net->push_back(Unit<PipeCell>());
    net->push_back(TiedHead(table->weight));
  } else {
    net->push_back(Split<torch::nn::Linear>(5, kPipeWidth));
    for (int64_t i = 0; i < cells; ++i) net->push_back(Unit<PipeCell>());
    net->push_back(Split<torch::nn::Linear>(kPipeWidth, 3));
  }
  net->to(torch::kDouble);
  if (kind == PipeModel::tied) {  // to() may have given both a tensor of their own
    auto table = net->ptr<TiedTableImpl>(0);
    auto head = net->ptr<TiedHeadImpl>(net->size() - 1);
    head->weight.set_data(table->weight.data());
    if (!head->weight.is_same(table->weight)) throw std::logic_error("the test's weight is not tied");
  }
  return net;
}

struct PipeData {
  at::Tensor inputs, targets;
};
inline PipeData pipe_data(PipeModel kind, int64_t step, int64_t rows = kPipeRows) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(100 + step));
  if (kind == PipeModel::tied) {
    return {torch::randint(0, 9, {rows, 2}, generator, torch::kLong), torch::randn({rows, 2, 9}, generator, torch::kDouble)};
  }
  const at::Tensor x = torch::randn({rows, 5}, generator, torch::kDouble);
  return {x, torch::sin(2 * x.narrow(1, 0, 3))};
}

/// Mean over rows.
inline at::Tensor pipe_loss(const at::Tensor& out, const at::Tensor& target) { return (out - target).square().flatten(1).sum(1).mean(); }

struct PipeTrace {
  std::vector<double> losses;
  std::map<std::string, at::Tensor> gradients, weights;  // gradients: of the last step
};

inline void note_tensors(std::map<std::string, at::Tensor>& into, torch::nn::Module& module, bool gradients) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  for (const auto& p : module.named_parameters()) {
    const at::Tensor value = gradients ? p.value().grad() : p.value().detach();
    if (value.defined()) into[p.key()] = value.clone();
  }
}

constexpr int64_t kPipeSteps = 3;

/// Momentum SGD over every parameter once, under whatever names.
inline torch::optim::SGD pipe_optimizer(torch::nn::Module& module, double rate = 0.01) {
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& p : module.parameters()) {
    if (std::none_of(parameters.begin(), parameters.end(), [&](const at::Tensor& q) { return q.is_same(p); })) parameters.push_back(p);
  }
  return torch::optim::SGD(parameters, torch::optim::SGDOptions(rate).momentum(0.9));
}

/// One rank, plain libtorch. calls: the batch comes in so many pieces, whose gradients add up.
inline PipeTrace pipe_reference(int64_t cells, PipeModel kind, int64_t rows = kPipeRows, int calls = 1) {
  torch::nn::Sequential net = pipe_model(cells, kind);
  torch::optim::SGD optimizer = pipe_optimizer(*net);
  PipeTrace trace;
  for (int64_t step = 0; step < kPipeSteps; ++step) {
    optimizer.zero_grad();
    double total = 0;
    for (int call = 0; call < calls; ++call) {
      const PipeData data = pipe_data(kind, step * calls + call, rows);
      const at::Tensor loss = pipe_loss(net->forward(data.inputs), data.targets);
      loss.backward();
      total += loss.item<double>();
    }
    trace.losses.push_back(total);
    if (step + 1 == kPipeSteps) note_tensors(trace.gradients, *net, true);
    optimizer.step();
  }
  note_tensors(trace.weights, *net, false);
  return trace;
}

inline double worst_difference(const std::map<std::string, at::Tensor>& found, const std::map<std::string, at::Tensor>& expected) {
  double worst = found.size() == expected.size() ? 0 : 1e300;
  for (const auto& [name, value] : expected) {
    const auto it = found.find(name);
    if (it == found.end() || it->second.sizes() != value.sizes()) return 1e300;
    const double difference = (it->second - value).abs().max().item<double>() / std::max(value.abs().max().item<double>(), 1e-12);
    worst = std::isfinite(difference) ? std::max(worst, difference) : 1e300;
  }
  return worst;
}

inline void expect_same(const PipeTrace& found, const PipeTrace& expected) {
  ASSERT_EQ(found.losses.size(), expected.losses.size());
  for (size_t i = 0; i < found.losses.size(); ++i) EXPECT_NEAR(found.losses[i], expected.losses[i], kFp64Parity * expected.losses[i]);
  EXPECT_LT(expected.losses.back(), 0.95 * expected.losses.front()) << "it does not learn";
  for (const auto& [name, gradient] : expected.gradients) EXPECT_GT(gradient.abs().max().item<double>(), 1e-6) << name;
  EXPECT_LE(worst_difference(found.gradients, expected.gradients), kFp64Parity);
  EXPECT_LE(worst_difference(found.weights, expected.weights), kFp64Parity);
}

}  // namespace weft::testing
