// A stack of Units between plain layers, and a training run on it whose one-rank result every dial position must reproduce.
#pragma once

#include <mutex>
#include <vector>

#include "tests/support/problem.h"
#include "weft/nn/unit.h"
#include "weft/optim/loss_scaler.h"
#include "weft/optim/optim.h"

namespace weft::testing {

constexpr int64_t kWidth = 9;  // odd: nothing divides by the ranks

struct CellImpl : torch::nn::Module {
  CellImpl() {
    up = register_module("up", torch::nn::Linear(kWidth, 13));
    down = register_module("down", torch::nn::Linear(13, kWidth));
    scale = register_parameter("scale", torch::ones({}));  // smaller than any group of ranks
    fixed = register_parameter("fixed", torch::randn({kWidth}) * 0.1, /*requires_grad=*/false);
    unused = register_parameter("unused", torch::ones({3}));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::tanh(up(x + fixed))) * scale; }
  torch::nn::Linear up{nullptr}, down{nullptr};
  at::Tensor scale, fixed, unused;
};
TORCH_MODULE(Cell);

struct StackImpl : torch::nn::Module {
  StackImpl() {
    torch::manual_seed(3);
    in = register_module("in", Unit<torch::nn::Linear>(6, kWidth));
    a = register_module("a", Unit<Cell>());
    b = register_module("b", Unit<Cell>());
    c = register_module("c", Unit<Cell>());
    out = register_module("out", torch::nn::Linear(kWidth, 3));
    to(torch::kDouble);
  }
  /// b is used twice. use_c: a branch that some ranks may not take.
  at::Tensor forward(const at::Tensor& x, bool use_c = true) {  // [B, 6] -> [B, 3]
    at::Tensor h = b(a(b(in(x))));
    if (use_c) h = c(h);
    return out(h);
  }
  Unit<torch::nn::Linear> in{nullptr};
  Unit<Cell> a{nullptr}, b{nullptr}, c{nullptr};
  torch::nn::Linear out{nullptr};
};
TORCH_MODULE(Stack);

inline Stack make_stack() {
  static std::mutex generator;
  const std::lock_guard lock(generator);
  return Stack();
}

/// The user's own: knows nothing of shards. Sign descent with momentum (Lion without decay).
struct SignDescent : torch::optim::Optimizer {
  SignDescent(std::vector<at::Tensor> parameters, double rate)
      : Optimizer(std::move(parameters), std::make_unique<torch::optim::SGDOptions>(rate)), rate(rate) {}
  at::Tensor step(LossClosure) override {
    const at::NoGradGuard no_grad;
    for (at::Tensor& p : param_groups()[0].params()) {
      if (p.grad().defined()) p.add_(p.grad() / (p.grad().abs() + 1.0), -rate);
    }
    return {};
  }
  double rate;
};

enum class Method { weft_adamw, weft_sgd, torch_adamw, own };

struct StackSetting {
  DataParallelOptions options;
  Method method = Method::weft_adamw;
  int64_t micro_steps = 1;
  bool reduce_every_micro_step = false;
  bool across_once = false;  // over the replicas in the last micro-step only
  int64_t steps = 12;
  int64_t gradient_step = -1;  // whose gradients are in the trace; -1: the last
  int64_t batch = 24;
  at::ScalarType dtype = at::kDouble;  // of parameters and products; fp16 trains with a LossScaler
  double clip = 0.5;  // below the norm of the first steps: clipping acts
  std::vector<bool> take_branch;  // per rank; empty: all
};

/// Pieces of the first `count` ranks (0: all) one after the other.
inline at::Tensor assemble(const Comm& comm, const at::Tensor& piece, int64_t count = 0) {
  at::Tensor sizes = torch::empty({comm.size()}, torch::kLong);
  comm.all_gather(sizes, torch::full({1}, piece.numel(), torch::kLong)).wait();
  const int64_t longest = sizes.max().item<int64_t>();
  at::Tensor padded = torch::zeros({longest}, piece.options().requires_grad(false));
  padded.narrow(0, 0, piece.numel()).copy_(piece.detach().flatten());
  at::Tensor all = torch::empty({comm.size(), longest}, padded.options());
  comm.all_gather(all, padded).released();
  std::vector<at::Tensor> parts;
  for (int64_t r = 0; r < (count > 0 ? count : comm.size()); ++r) parts.push_back(all[r].narrow(0, 0, sizes[r].item<int64_t>()));
  return torch::cat(parts);
}

inline std::unique_ptr<torch::optim::Optimizer> make_method(Method method, const DataParallel& dp) {
  std::vector<at::Tensor> shards;
  for (const NamedTensor& s : dp.shards()) shards.push_back(s.tensor);
  switch (method) {
    case Method::weft_adamw:
      return std::make_unique<optim::AdamW>(optim::decay_matrices_only(dp, optim::AdamWOptions(3e-2).weight_decay(0.1)));
    case Method::weft_sgd: {
      const auto options = optim::SGDOptions(0.1).momentum(0.9);
      return std::make_unique<optim::SGD>(optim::param_groups<optim::SGDOptions>(dp, {{"*.bias|*.scale", options}, {"*", options}}), options);
    }
    case Method::torch_adamw: return std::make_unique<torch::optim::AdamW>(shards, torch::optim::AdamWOptions(3e-2));
    case Method::own: return std::make_unique<SignDescent>(shards, 0.2);
  }
  return nullptr;
}

/// Losses are means over the global batch. Everything in the trace is fp64, whatever the run's dtype.
inline Trace train_stack(const Comm& comm, const StackSetting& s) {
  Stack net = make_stack();
  net->to(s.dtype);
  if (comm.rank() > 0) {
    const at::NoGradGuard no_grad;
    for (at::Tensor& p : net->parameters()) p.add_(comm.rank());
  }
  DataParallel dp(net, comm, s.options);
  const auto optimizer = make_method(s.method, dp);
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
  std::optional<optim::LossScaler> scaler;
  if (s.dtype == at::kHalf) scaler.emplace(optim::LossScalerOptions{.initial = 1024});
  const at::Tensor inputs = torch::randn({s.batch * s.steps, 6}, generator, torch::kDouble);
  const at::Tensor targets = torch::sin(inputs.narrow(1, 0, 3) * 2);
  const int64_t rows = s.batch / s.micro_steps / comm.size();
  Trace trace;
  for (int64_t step = 0; step < s.steps; ++step) {
    at::Tensor total = torch::zeros({1}, torch::kDouble);
    for (int64_t k = 0; k < s.micro_steps; ++k) {
      dp.sync(s.reduce_every_micro_step || k + 1 == s.micro_steps);
      if (s.reduce_every_micro_step && k > 0) dp.continue_accumulation();
      if (s.across_once) dp.sync_replicas(k + 1 == s.micro_steps);
      const int64_t begin = step * s.batch + (k * comm.size() + comm.rank()) * rows;
      const bool branch = s.take_branch.empty() || s.take_branch[comm.rank()];
      const at::Tensor out = net->forward(inputs.narrow(0, begin, rows).to(s.dtype), branch);
      const at::Tensor loss = (out.to(s.dtype == at::kDouble ? at::kDouble : at::kFloat) - targets.narrow(0, begin, rows)).square().sum();
      const at::Tensor mean = scale_loss(loss, s.batch, dp);
      (scaler ? scaler->scale(mean) : mean).backward();
      total += loss.detach();
    }
    comm.all_reduce(total).wait();
    trace.losses.push_back(total.item<double>() / static_cast<double>(s.batch));
    if (scaler && !scaler->unscale(dp)) ADD_FAILURE() << "fp16 overflowed";
    const double norm = dp.clip_grad_norm(s.clip);
    if (step == (s.gradient_step < 0 ? s.steps - 1 : s.gradient_step)) {
      trace.gradients.push_back(torch::tensor({norm}, torch::kDouble));
      for (const NamedTensor& shard : dp.shards()) {
        const at::Tensor grad = shard.tensor.grad();
        if (!grad.defined()) continue;
        const at::Tensor whole = comm.size() > 1 && s.options.sharding != Sharding::none ? assemble(comm, grad, s.options.dp_shard) : grad.flatten().clone();
        trace.gradients.push_back(whole.to(torch::kDouble));
      }
    }
    dp.step(*optimizer);
    dp.zero_grad();
  }
  const auto full = dp.gather_full();
  for (const at::Tensor& p : net->parameters()) trace.weights.push_back(p.detach().to(torch::kDouble, /*non_blocking=*/false, /*copy=*/true));
  return trace;
}

/// Bytes that this rank has sent in dp's groups so far.
inline int64_t sent_bytes(const DataParallel& dp) {
  int64_t bytes = 0;
  for (const auto& [op, count] : dp.traffic()) bytes += count.sent;
  return bytes;
}

}  // namespace weft::testing
