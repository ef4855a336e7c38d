#include "tests/support/problem.h"

#include <limits>
#include <mutex>
#include <numeric>

namespace weft::testing {
namespace {

struct Rows {
  int64_t begin, count;
};

Rows rows_of(int rank, int ranks, int64_t total, const std::vector<int64_t>& given) {
  if (given.empty()) return {rank * (total / ranks), total / ranks};
  return {std::accumulate(given.begin(), given.begin() + rank, int64_t{0}), given.at(rank)};
}

double relative(const at::Tensor& a, const at::Tensor& b, double floor) {
  if (b.numel() == 0) return 0;
  const double worst = (a - b).abs().max().item<double>() / std::max(b.abs().max().item<double>(), floor);
  return std::isfinite(worst) ? worst : std::numeric_limits<double>::infinity();
}

}  // namespace

Net make_net() {
  static std::mutex generator;
  const std::lock_guard lock(generator);
  return Net();
}

Trace train(const Comm& comm, const Setting& s) {
  Net net = make_net();
  net->to(s.dtype);
  // Another start on every rank but the first: construction has to make them equal.
  if (comm.rank() > 0) {
    const at::NoGradGuard no_grad;
    for (at::Tensor& p : net->parameters()) p.add_(comm.rank());
  }
  DataParallel dp(net.ptr(), comm, s.options);
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (s.adam) {
    optimizer = std::make_unique<torch::optim::AdamW>(net->parameters(), torch::optim::AdamWOptions(1e-2));
  } else {
    optimizer = std::make_unique<torch::optim::SGD>(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  }
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(11);
  const at::Tensor inputs = torch::randn({s.global_batch * s.steps, 6}, generator, torch::kDouble).to(s.dtype);
  const at::Tensor targets = torch::sin(inputs.narrow(1, 0, 3) * 2);
  const int64_t micro = s.global_batch / s.micro_steps;
  const Rows mine = rows_of(comm.rank(), comm.size(), micro, s.rows);

  Trace trace;
  for (int64_t step = 0; step < s.steps; ++step) {
    optimizer->zero_grad();
    at::Tensor total = torch::zeros({1}, torch::kDouble);
    for (int64_t k = 0; k < s.micro_steps; ++k) {
      dp.sync(k + 1 == s.micro_steps);
      const int64_t begin = step * s.global_batch + k * micro + mine.begin;
      const at::Tensor error = net(inputs.narrow(0, begin, mine.count)) - targets.narrow(0, begin, mine.count);
      const at::Tensor loss_sum = error.square().sum();
      scale_loss(loss_sum, s.global_batch, dp).backward();
      total += loss_sum.detach().to(torch::kDouble);
    }
    comm.all_reduce(total).wait();
    trace.losses.push_back(total.item<double>() / static_cast<double>(s.global_batch));
    if (s.fault) s.fault(dp, net);
    if (step + 1 == s.steps) {
      for (const at::Tensor& p : net->parameters()) trace.gradients.push_back(p.grad().clone());
    }
    optimizer->step();
  }
  for (const at::Tensor& p : net->parameters()) trace.weights.push_back(p.detach().clone());
  return trace;
}

double difference(const Trace& trace, const Trace& reference) {
  double largest_norm = 0;
  for (const at::Tensor& g : reference.gradients) largest_norm = std::max(largest_norm, g.norm().item<double>());
  EXPECT_GT(largest_norm, 1e-6) << "the reference's gradients are zero";
  EXPECT_LT(reference.losses.back(), 0.9 * reference.losses.front()) << "the reference does not learn";
  const double floor = 1e-6 * largest_norm;
  double worst = 0;
  for (size_t i = 0; i < reference.losses.size(); ++i)
    worst = std::max(worst, std::abs(trace.losses[i] - reference.losses[i]) / std::abs(reference.losses[i]));
  for (size_t i = 0; i < reference.gradients.size(); ++i)
    worst = std::max(worst, relative(trace.gradients[i], reference.gradients[i], floor));
  for (size_t i = 0; i < reference.weights.size(); ++i)
    worst = std::max(worst, relative(trace.weights[i], reference.weights[i], floor));
  return std::isfinite(worst) ? worst : std::numeric_limits<double>::infinity();
}

}  // namespace weft::testing
