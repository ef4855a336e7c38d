// Every optimizer at every position of the dial, against one rank.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tests/support/pairwise.h"
#include "tests/support/problem.h"
#include "weft/nn/unit.h"
#include "weft/optim/adafactor.h"
#include "weft/optim/adam8bit.h"
#include "weft/optim/lion.h"
#include "weft/optim/muon.h"
#include "weft/optim/optim.h"

namespace weft::testing {

/// Matrices above the least size of 8-bit moments; blocks of 256, rows and whole matrices all fall across cuts of 2 and 3 ranks.
struct LayerImpl : torch::nn::Module {
  LayerImpl() {
    up = register_module("up", torch::nn::Linear(65, 70));
    down = register_module("down", torch::nn::Linear(70, 65));
    scale = register_parameter("scale", torch::ones({}));
    unused = register_parameter("unused", torch::ones({5, 7}));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::tanh(up(x))) * scale; }
  torch::nn::Linear up{nullptr}, down{nullptr};
  at::Tensor scale, unused;
};
TORCH_MODULE(Layer);

struct LayersImpl : torch::nn::Module {
  LayersImpl() {
    torch::manual_seed(3);
    in = register_module("in", torch::nn::Linear(6, 65));
    a = register_module("a", Unit<Layer>());
    b = register_module("b", Unit<Layer>());
    out = register_module("out", torch::nn::Linear(65, 3));
  }
  at::Tensor forward(const at::Tensor& x) { return out(b(a(in(x)))); }  // [B, 6] -> [B, 3]
  torch::nn::Linear in{nullptr}, out{nullptr};
  Unit<Layer> a{nullptr}, b{nullptr};
};
TORCH_MODULE(Layers);

struct OptimizerKind {
  const char* name;
  std::function<std::unique_ptr<torch::optim::Optimizer>(const DataParallel&)> make;
  int64_t granule = 1;
};

inline std::unique_ptr<torch::optim::Optimizer> make_muon(const DataParallel& dp, const optim::MuonOptions& options) {
  const bool replicated = dp.options().sharding == Sharding::none;
  return std::make_unique<optim::Muon>(optim::muon_groups(dp, options, "in.*|out.*"), options, replicated ? dp.comm() : Comm());
}

inline std::vector<OptimizerKind> optimizer_kinds() {
  using namespace optim;  // NOLINT(google-build-using-namespace): one table of its names
  const auto adamw = AdamWOptions(1e-2).betas({0.9, 0.95}).weight_decay(0.1);
  return {{"adamw", [=](const DataParallel& dp) { return std::make_unique<AdamW>(decay_matrices_only(dp, adamw)); }},
          {"adamw_bf16_moments",
           [=](const DataParallel& dp) {
             auto optimizer = std::make_unique<AdamW>(decay_matrices_only(dp, adamw));
             optimizer->keep_moments_in_bf16();
             return optimizer;
           }},
          {"sgd",
           [](const DataParallel& dp) {
             const auto options = SGDOptions(0.02).momentum(0.9).nesterov(true).weight_decay(0.01);
             return std::make_unique<SGD>(decay_matrices_only(dp, options), options);
           }},
          {"lion", [](const DataParallel& dp) { return std::make_unique<Lion>(decay_matrices_only(dp, LionOptions(3e-3).weight_decay(0.1))); }},
          {"adafactor", [](const DataParallel& dp) { return std::make_unique<Adafactor>(decay_matrices_only(dp, AdafactorOptions(0.1).weight_decay(0.01))); }},
          {"adafactor_momentum",
           [](const DataParallel& dp) {
             return std::make_unique<Adafactor>(decay_matrices_only(dp, AdafactorOptions(1e-2).scale_parameter(false).beta1(0.9)));
           }},
          {"adam8bit", [=](const DataParallel& dp) { return std::make_unique<Adam8bit>(decay_matrices_only(dp, adamw)); }, 256},
          {"muon", [](const DataParallel& dp) { return make_muon(dp, MuonOptions(1e-2)); }},
          {"muon_original_scale", [](const DataParallel& dp) { return make_muon(dp, MuonOptions(1e-2).match_adamw(false).nesterov(false)); }}};
}

inline Layers make_layers() {
  static std::mutex generator;
  const std::lock_guard lock(generator);
  return Layers();
}

/// Losses are means over the global batch; the trace is in fp64, whatever the run's dtype.
inline Trace train_layers(const Comm& comm, const OptimizerKind& kind, at::ScalarType dtype, DataParallelOptions options) {
  constexpr int64_t kSteps = 10, kBatch = 24;
  at::set_num_threads(1);  // of this thread: ranks are threads already
  Layers net = make_layers();
  net->to(dtype);
  options.granules = {{"*", kind.granule}};
  if (c10::isReducedFloatingType(dtype)) options.gradient_dtype = at::kFloat;
  DataParallel dp(net, comm, options);
  const auto optimizer = kind.make(dp);
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
  const at::Tensor inputs = torch::randn({kBatch * kSteps, 6}, generator, torch::kDouble);
  const at::Tensor targets = torch::sin(inputs.narrow(1, 0, 3) * 2);
  const int64_t rows = kBatch / comm.size();
  Trace trace;
  for (int64_t step = 0; step < kSteps; ++step) {
    const int64_t begin = step * kBatch + comm.rank() * rows;
    const at::Tensor out = net->forward(inputs.narrow(0, begin, rows).to(dtype)).to(optim::wide_dtype(dtype));
    const at::Tensor loss = (out - targets.narrow(0, begin, rows)).square().sum();
    scale_loss(loss, kBatch, dp).backward();
    at::Tensor total = loss.detach().to(torch::kDouble).reshape({1});
    comm.all_reduce(total).wait();
    trace.losses.push_back(total.item<double>() / static_cast<double>(kBatch));
    const double norm = dp.grad_norm();
    if (step + 1 == kSteps) trace.gradients.push_back(torch::tensor({norm}, torch::kDouble));
    optimizer->step();
    dp.zero_grad();
  }
  const auto full = dp.gather_full();
  EXPECT_TRUE(at::equal(net->a->unused.detach().to(torch::kDouble), torch::ones({5, 7}, torch::kDouble))) << "what nobody used is left alone";
  for (const at::Tensor& p : net->parameters()) trace.weights.push_back(p.detach().to(torch::kDouble, /*non_blocking=*/false, /*copy=*/true));
  return trace;
}

inline const std::vector<std::pair<const char*, at::ScalarType>> kDtypes{{"fp64", at::kDouble}, {"fp32", at::kFloat}, {"bf16", at::kBFloat16}};

/// Kind, zero, dtype, ranks (1 to 3).
using OptimizerCell = std::vector<size_t>;
inline std::vector<size_t> optimizer_sizes() { return {optimizer_kinds().size(), 4, kDtypes.size(), 3}; }

inline std::string name_of(const ::testing::TestParamInfo<OptimizerCell>& info) {
  const OptimizerCell& c = info.param;
  return std::string(optimizer_kinds()[c[0]].name) + "_zero" + std::to_string(c[1]) + "_" + kDtypes[c[2]].first + "_" + std::to_string(c[3] + 1) + "ranks";
}

inline double largest_loss_difference(const Trace& a, const Trace& b) {
  double worst = 0;
  for (size_t i = 0; i < a.losses.size(); ++i) worst = std::max(worst, std::abs(a.losses[i] - b.losses[i]) / std::abs(b.losses[i]));
  return worst;
}

/// One rank's, trained once.
inline const Trace& one_rank(const OptimizerKind& kind, at::ScalarType dtype) {
  static std::map<std::pair<std::string, at::ScalarType>, Trace> traces;
  const auto [place, fresh] = traces.try_emplace({kind.name, dtype});
  if (fresh) place->second = train_layers(Comm(), kind, dtype, {});
  EXPECT_LT(place->second.losses.back(), 0.9 * place->second.losses.front()) << "the reference does not learn";
  return place->second;
}

/// fp64: everything within 1e-10; fp32: losses within 1e-5; bf16: losses at most twice as far from fp64 as one rank's.
inline void expect_optimizer_parity(const OptimizerCell& c) {
  const OptimizerKind kind = optimizer_kinds()[c[0]];
  const at::ScalarType dtype = kDtypes[c[2]].second;
  const Trace& reference = one_rank(kind, dtype);
  const Trace& exact = dtype == at::kBFloat16 ? one_rank(kind, at::kDouble) : reference;
  on_threads(static_cast<int>(c[3]) + 1, [&](World& world) {
    const Trace trace = train_layers(world.comm(), kind, dtype,
                                     {.sharding = sharding_of_zero(static_cast<int64_t>(c[1])), .bucket = {.bytes = 12000, .last_bytes = 2000}});
    if (dtype == at::kDouble) {
      EXPECT_LE(difference(trace, reference), 1e-10);
    } else if (dtype == at::kFloat) {
      EXPECT_LE(largest_loss_difference(trace, reference), 1e-5);
    } else {
      EXPECT_LE(largest_loss_difference(trace, exact), 2 * largest_loss_difference(reference, exact));
    }
  });
}

}  // namespace weft::testing
