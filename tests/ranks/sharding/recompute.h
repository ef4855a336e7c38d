// A model with everything that recompute gets wrong elsewhere, and a training run on it whose one-rank result without
// recompute every mode must reproduce at every position of the dial.
#pragma once

#include <string>
#include <torch/nn/modules/embedding.h>

#include "tests/ranks/sharding/stack.h"
#include "tests/support/pairwise.h"
#include "weft/nn/activations.h"
#include "weft/nn/dropout.h"

namespace weft::testing {

constexpr int64_t kTokens = 5, kVocabulary = 11;

/// Two results; a frozen base under trainable adapters; dropout from counters.
struct AdaptedImpl : torch::nn::Module {
  explicit AdaptedImpl(const char* name) : dropout(0.3, 7, name, kTokens) {
    base = register_parameter("base", torch::randn({kWidth, kWidth}) * 0.2, /*requires_grad=*/false);
    down = register_parameter("down", torch::randn({2, kWidth}) * 0.2);
    up = register_parameter("up", torch::randn({kWidth, 2}) * 0.2);
    unused = register_parameter("unused", torch::ones({3}));
  }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, const nn::TokenPlace& place) {  // [B, T, D] -> twice the same
    const at::Tensor product = autograd::part(autograd::Part::matmul, {x}, [x, w = base] { return torch::linear(x, w); });
    const at::Tensor low = autograd::part(autograd::Part::matmul, {x}, [x, w = down] { return torch::linear(x, w); });
    const at::Tensor h = torch::tanh(product + torch::linear(low, up));
    return {dropout(h, place), torch::sigmoid(h) * x};
  }
  at::Tensor base, down, up, unused;
  nn::Dropout dropout;
};
TORCH_MODULE(Adapted);

/// Attention and two products, one with a weight that two of these share.
struct MixImpl : torch::nn::Module {
  explicit MixImpl(const at::Tensor& shared_weight) {
    own = register_module("own", torch::nn::Linear(kWidth, kWidth));
    shared = register_parameter("shared", shared_weight);
    calls = register_buffer("calls", torch::zeros({}, torch::kLong));
  }
  at::Tensor forward(at::Tensor x) {  // [B, T, D]
    calls += 1;
    const at::Tensor q = autograd::part(autograd::Part::matmul, {x}, [x, w = own->weight, b = own->bias] { return torch::linear(x, w, b); });
    const at::Tensor mixed = autograd::part(autograd::Part::attention_scores, {q, x}, [q, x] {
      return torch::matmul(torch::softmax(torch::matmul(q, x.transpose(1, 2)), -1), x);
    });
    return x + torch::tanh(torch::linear(mixed, shared) * torch::linear(torch::silu(q), shared));
  }
  torch::nn::Linear own{nullptr};
  at::Tensor shared, calls;
};
TORCH_MODULE(Mix);

struct PatchworkImpl : torch::nn::Module {
  PatchworkImpl() {
    torch::manual_seed(11);
    table = register_module("table", Unit<torch::nn::Embedding>(kVocabulary, kWidth));
    lift = register_module("lift", Unit<torch::nn::Linear>(3, kWidth));
    adapted = register_module("adapted", Unit<Adapted>("adapted"));
    const at::Tensor weight = torch::randn({kWidth, kWidth}) * 0.3;
    first = register_module("first", Unit<Mix>(weight));
    second = register_module("second", Unit<Mix>(weight));
    if (!second->shared.is_same(first->shared)) throw std::logic_error("not tied");
    head = register_module("head", torch::nn::Linear(kWidth, 1));
    to(torch::kDouble);
  }
  /// ids [B, T] int64, places [B, T, 3] -> [B]
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& places, const nn::TokenPlace& place) {
    auto [h, gate] = adapted(table(ids) + lift(places), place);
    h = first(h) * gate;
    h = second(first(h));  // first is used twice
    return head(h).sum({1, 2});
  }
  Unit<torch::nn::Embedding> table{nullptr};
  Unit<torch::nn::Linear> lift{nullptr};
  Unit<Adapted> adapted{nullptr};
  Unit<Mix> first{nullptr}, second{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Patchwork);

inline Patchwork make_patchwork() {
  static std::mutex generator;
  const std::lock_guard lock(generator);
  return Patchwork();
}

struct Mode {
  const char* name;
  Recompute recompute;
  int64_t every = 1;
  bool on_host = false;
};
inline const std::vector<Mode> kModes{{"none", Recompute::none},
                                      {"full", Recompute::full},
                                      {"half", Recompute::half},
                                      {"keep_attention", Recompute::keep_attention},
                                      {"keep_matmuls", Recompute::keep_matmuls},
                                      {"attention", Recompute::attention},
                                      {"full_every_2nd", Recompute::full, 2},
                                      {"on_host", Recompute::none, 1, true}};

struct Place {
  const char* name;
  int ranks;
  DataParallelOptions options;
};
inline const std::vector<Place>& places() {
  static const std::vector<Place> all{{"zero0_2", 2, {.sharding = Sharding::none}},
                                      {"zero1_3", 3, {.sharding = Sharding::optimizer}},
                                      {"zero2_2", 2, {.sharding = Sharding::gradients}},
                                      {"zero3_2", 2, {.sharding = Sharding::parameters}},
                                      {"zero3_3", 3, {.sharding = Sharding::parameters}},
                                      {"zero3_keep_3", 3, {.sharding = Sharding::parameters, .reshard_after_forward = false}},
                                      {"zero3_near_4", 4, {.sharding = Sharding::parameters, .reshard_after_forward = 2}},
                                      {"hsdp_4", 4, {.sharding = Sharding::parameters, .dp_shard = 2}}};
  return all;
}

struct PatchworkSetting {
  Mode mode = kModes[0];
  DataParallelOptions options;
  bool force = false;  // the loss holds a gradient by the places
  int64_t steps = 6, batch = 12;
  at::ScalarType dtype = at::kDouble;
};

inline Trace train_patchwork(const Comm& comm, const PatchworkSetting& s) {
  Patchwork net = make_patchwork();
  net->to(s.dtype);
  DataParallel dp(net, comm, s.options);
  if (s.mode.recompute != Recompute::none) set_recompute(net, {.mode = s.mode.recompute, .every = s.mode.every});
  if (s.mode.on_host) offload_activations(net);
  const auto optimizer = make_method(Method::weft_adamw, dp);
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
  const int64_t rows = s.batch / comm.size(), begin = comm.rank() * rows;
  Trace trace;
  const at::Tensor ids = torch::randint(kVocabulary, {s.batch, kTokens}, generator, torch::kLong).narrow(0, begin, rows);
  const at::Tensor all = torch::randn({s.batch, kTokens, 3}, generator, torch::kDouble).to(s.dtype);
  for (int64_t step = 0; step < s.steps; ++step) {
    const at::Tensor where = all.narrow(0, begin, rows).clone().requires_grad_(s.force);
    const at::Tensor energy = net(ids, where, nn::TokenPlace{.step = step, .first_sample = begin});
    at::Tensor loss = (energy - where.detach().sum({1, 2})).square().sum();
    if (s.force) {
      const at::Tensor force = torch::autograd::grad({energy.sum()}, {where}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
      loss = loss + (force + torch::cos(where.detach())).square().sum();
    }
    scale_loss(loss, s.batch, dp).backward();
    const at::Tensor total = loss.detach().to(torch::kDouble).view({1});
    comm.all_reduce(total).wait();
    trace.losses.push_back(total.item<double>() / static_cast<double>(s.batch));
    const double norm = dp.clip_grad_norm(1.0);
    if (step + 1 == s.steps) {
      trace.gradients.push_back(torch::tensor({norm}, torch::kDouble));
      for (const NamedTensor& shard : dp.shards()) {
        const at::Tensor grad = shard.tensor.grad();
        EXPECT_EQ(grad.defined(), shard.name != "adapted.unused") << shard.name;
        if (!grad.defined()) continue;
        const bool sharded = comm.size() > 1 && s.options.sharding != Sharding::none;
        trace.gradients.push_back((sharded ? assemble(comm, grad, s.options.dp_shard) : grad.flatten().clone()).to(torch::kDouble));
      }
    }
    dp.step(*optimizer);
    dp.zero_grad();
  }
  EXPECT_EQ(net->first->calls.item<int64_t>(), 2 * s.steps) << "a second forward counted";
  const auto full = dp.gather_full();
  for (const at::Tensor& p : net->parameters()) trace.weights.push_back(p.detach().to(torch::kDouble, /*non_blocking=*/false, /*copy=*/true));
  return trace;
}

/// Mode, place, units gathered ahead, whether the loss holds a gradient.
using RecomputeCell = std::vector<size_t>;
inline const std::vector<int64_t> kPrefetch{1, 0, 3};
inline std::vector<size_t> recompute_sizes() { return {kModes.size(), places().size(), kPrefetch.size(), 2}; }

inline void expect_recompute_parity(const std::vector<RecomputeCell>& cells, at::ScalarType dtype = at::kDouble) {
  Trace references[2];
  for (const bool force : {false, true}) references[force] = train_patchwork(Comm(), {.force = force, .dtype = dtype});
  for (const RecomputeCell& cell : cells) {
    const Place& place = places()[cell[1]];
    PatchworkSetting setting{.mode = kModes[cell[0]], .options = place.options, .force = cell[3] == 1, .dtype = dtype};
    setting.options.prefetch = kPrefetch[cell[2]];
    setting.options.bucket = {.bytes = 400, .last_bytes = 100};
    SCOPED_TRACE(std::string(setting.mode.name) + ", " + place.name + ", prefetch " + std::to_string(setting.options.prefetch) +
                 (setting.force ? ", a gradient in the loss" : ""));
    const Trace& reference = references[setting.force];
    on_threads(place.ranks, [&](World& world) {
      const Trace trace = train_patchwork(world.comm(), setting);
      ASSERT_EQ(trace.gradients.size(), reference.gradients.size());
      if (dtype == at::kDouble) {
        EXPECT_LE(difference(trace, reference), 1e-10);
      } else {
        for (size_t i = 0; i < trace.losses.size(); ++i) EXPECT_NEAR(trace.losses[i], reference.losses[i], 1e-5 * std::abs(reference.losses[i]));
      }
    });
  }
}

}  // namespace weft::testing
