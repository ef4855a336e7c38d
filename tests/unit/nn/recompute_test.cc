// Recompute of single Units: what is kept, what runs again, and what is refused.
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>

#include <functional>

#include "weft/core/error.h"
#include "weft/nn/activations.h"
#include "weft/nn/dropout.h"
#include "weft/nn/unit.h"

namespace weft {
namespace {

using ::testing::HasSubstr;

/// A module whose forward is the test's own.
struct AnyImpl : torch::nn::Module {
  AnyImpl() {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
    w = register_parameter("w", torch::randn({6, 6}, generator, torch::kDouble) * 0.4);
    b = register_parameter("b", torch::randn({6}, generator, torch::kDouble));
    count = register_buffer("count", torch::zeros({}, torch::kLong));
  }
  at::Tensor forward(at::Tensor x) {
    ++calls;
    if (is_recomputing()) ++again;
    count += 1;
    return fn ? fn(*this, x) : torch::tanh(torch::linear(torch::tanh(x), w, b));
  }
  std::function<at::Tensor(AnyImpl&, at::Tensor)> fn;
  at::Tensor w, b, count;
  int calls = 0, again = 0;
};
TORCH_MODULE(Any);

using Forward = std::function<at::Tensor(AnyImpl&, at::Tensor)>;

/// Two Units one after the other.
struct PairImpl : torch::nn::Module {
  explicit PairImpl(Forward fn = nullptr) {
    a = register_module("a", Unit<Any>());
    b = register_module("b", Unit<Any>());
    a->fn = fn;
    b->fn = std::move(fn);
  }
  at::Tensor forward(const at::Tensor& x) { return b(a(x)); }
  Unit<Any> a{nullptr}, b{nullptr};
};
TORCH_MODULE(Pair);

at::Tensor input() {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(4);
  return torch::randn({5, 6}, generator, torch::kDouble);
}

std::vector<at::Tensor> gradients(torch::nn::Module& net) {
  std::vector<at::Tensor> list;
  for (const at::Tensor& p : net.parameters()) list.push_back(p.grad().defined() ? p.grad().clone() : torch::zeros({0}));
  net.zero_grad();
  return list;
}

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
}

/// The text of the ConfigError that `fn` must throw.
std::string refused(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "not refused";
}

constexpr Recompute kModes[] = {Recompute::keep_attention, Recompute::keep_matmuls, Recompute::half, Recompute::full};

TEST(Recompute, RunsEachUnitOnceMoreAndLeavesBuffersAlone) {
  Pair net;
  net(input()).sum().backward();
  const auto plain = gradients(*net);
  EXPECT_EQ(set_recompute(net), 2);
  EXPECT_FALSE(is_recomputing());
  net(input()).sum().backward();
  expect_equal(gradients(*net), plain);
  for (const auto& unit : {net->a, net->b}) {
    EXPECT_EQ(unit->calls, 3);
    EXPECT_EQ(unit->again, 1);
    EXPECT_EQ(unit->count.item<int64_t>(), 2) << "the second forward counted";
  }
  {
    const torch::NoGradGuard no_grad;
    net(input());
  }
  EXPECT_EQ(net->a->calls, 4);
  set_recompute(net, {.mode = Recompute::none, .units = "a"});
  net(input()).sum().backward();
  EXPECT_EQ(net->a->again, 1);
  EXPECT_EQ(net->b->again, 2);
}

/// Tells when memory goes.
at::Tensor tracked(const at::Tensor& value, int& alive) {
  ++alive;
  const at::Tensor copy = value.contiguous().clone();
  return torch::from_blob(copy.mutable_data_ptr(), copy.sizes(), [copy, &alive](void*) { --alive; }, copy.options());
}
struct Tracked : torch::autograd::Function<Tracked> {  // tanh, saves its result
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, int64_t alive) {
    const at::Tensor y = tracked(torch::tanh(x), *reinterpret_cast<int*>(alive));
    ctx->save_for_backward({y});
    return y;
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::tensor_list grads) {
    const at::Tensor y = ctx->get_saved_variables()[0];
    return {grads[0] * (1 - y * y), at::Tensor()};
  }
};

TEST(Recompute, HoldsTheActivationsOfOneUnitAtATimeAndNoneAfterwards) {
  int alive = 0;
  std::vector<int> seen;
  Pair net([&alive](AnyImpl& m, at::Tensor x) {
    for (int i = 0; i < 4; ++i) x = torch::linear(Tracked::apply(x, reinterpret_cast<int64_t>(&alive)), m.w, m.b);
    return x;
  });
  const auto counted = [&](bool retain) {
    const at::Tensor x = input().requires_grad_(), y = net->a(x), z = net->b(y);
    seen = {alive};
    y.register_hook([&](const at::Tensor&) { seen.push_back(alive); });  // b is done, a has not begun
    z.sum().backward({}, retain);
    seen.push_back(alive);
    return x.grad().clone();
  };
  const at::Tensor plain = counted(false);
  EXPECT_THAT(seen, ::testing::ElementsAre(8, 4, 0));
  set_recompute(net);
  EXPECT_TRUE(at::equal(counted(false), plain));
  EXPECT_THAT(seen, ::testing::ElementsAre(0, 0, 0));
  EXPECT_TRUE(at::equal(counted(true), plain));
  EXPECT_EQ(alive, 0) << "a retained graph keeps what a second forward made";
}

TEST(Recompute, RetainedGraphsPartsOfBackwardAndSecondDerivatives) {
  const auto run = [](Pair& net) {
    std::vector<at::Tensor> results;
    const at::Tensor x = input().requires_grad_(), y = net(x).square().sum();
    y.backward({}, /*retain_graph=*/true);
    y.backward({}, /*retain_graph=*/true);
    for (const at::Tensor& g : gradients(*net)) results.push_back(g);
    results.push_back(torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true)[0]);
    const at::Tensor force = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    (force.square().sum() + y).backward();
    for (const at::Tensor& g : gradients(*net)) results.push_back(g);
    results.push_back(x.grad());
    return results;
  };
  Pair net;
  const auto plain = run(net);
  for (const at::Tensor& t : plain) EXPECT_GT(t.abs().sum().item<double>(), 0);
  for (const Recompute mode : kModes) {
    set_recompute(net, {.mode = mode});
    expect_equal(run(net), plain);
  }
}

// Case 27, for layers that draw from libtorch's generator.
TEST(Recompute, ForeignDropoutDrawsTheSameMaskAndTheGeneratorGoesOn) {
  const auto run = [](Pair& net) {
    torch::manual_seed(6);
    net(input()).sum().backward();
    auto results = gradients(*net);
    results.push_back(torch::randn({3}));  // where the generator is afterwards
    return results;
  };
  Pair net([](AnyImpl& m, at::Tensor x) { return torch::dropout(torch::linear(torch::dropout(x, 0.5, true) + torch::randn_like(x), m.w), 0.5, true); });
  const auto plain = run(net);
  for (const Recompute mode : kModes) {
    set_recompute(net, {.mode = mode});
    expect_equal(run(net), plain);
  }
}

TEST(Recompute, BatchNormCountsABatchOnce) {
  const auto run = [](Recompute mode) {
    torch::manual_seed(2);
    torch::nn::Sequential net(torch::nn::Linear(6, 6), Unit<torch::nn::BatchNorm1d>(torch::nn::BatchNorm1dOptions(6)), torch::nn::Tanh());
    net->to(torch::kDouble);
    set_recompute(net, {.mode = mode});
    for (int step = 0; step < 2; ++step) net->forward(input()).square().sum().backward();
    auto results = gradients(*net);
    for (const at::Tensor& buffer : net->buffers()) results.push_back(buffer);
    return results;
  };
  const auto plain = run(Recompute::none);
  EXPECT_EQ(plain.back().item<int64_t>(), 2);
  expect_equal(run(Recompute::full), plain);
}

TEST(Recompute, AutocastIsAsItWas) {
  const auto run = [](Recompute mode) {
    Pair net;
    net->to(torch::kFloat);
    set_recompute(net, {.mode = mode});
    at::Tensor loss;
    {
      at::autocast::increment_nesting();
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
      at::autocast::set_autocast_enabled(at::kCPU, true);
      const at::Tensor y = net(input().to(torch::kFloat));
      at::autocast::set_autocast_enabled(at::kCPU, false);
      if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
      EXPECT_EQ(y.scalar_type(), at::kBFloat16);
      loss = y.to(torch::kFloat).square().sum();
    }
    loss.backward();
    return gradients(*net);
  };
  expect_equal(run(Recompute::full), run(Recompute::none));
}

TEST(Recompute, KeptPartsDoNotRunAgain) {
  int products = 0, attentions = 0;
  Pair net([&](AnyImpl& m, at::Tensor x) {
    for (int i = 0; i < 3; ++i) {
      x = torch::tanh(autograd::part(autograd::Part::matmul, {x}, [&products, x, w = m.w] {
        ++products;
        return torch::linear(x, w);
      }));
    }
    x = torch::sigmoid(x);
    return torch::tanh(autograd::part(autograd::Part::attention_scores, {x}, [&attentions, x] {
      ++attentions;
      return torch::matmul(torch::softmax(torch::matmul(x, x.t()), 1), x);
    }));
  });
  net(input()).square().sum().backward();
  const auto plain = gradients(*net);
  struct Expected {
    Recompute mode;
    int products, attentions;  // in both Units
  };
  for (const Expected& e : {Expected{Recompute::none, 6, 2}, {Recompute::attention, 6, 4}, {Recompute::keep_matmuls, 6, 2},
                            {Recompute::half, 8, 2}, {Recompute::keep_attention, 12, 2}, {Recompute::full, 12, 4}}) {
    set_recompute(net, {.mode = e.mode});
    products = attentions = 0;
    net(input()).square().sum().backward();
    expect_equal(gradients(*net), plain);
    EXPECT_EQ(products, e.products) << recompute_name(e.mode);
    EXPECT_EQ(attentions, e.attentions) << recompute_name(e.mode);
  }
}

TEST(Recompute, EndsWithTheLastTensorThatIsNeeded) {
  int ends = 0;
  Pair net([&ends](AnyImpl& m, at::Tensor x) {
    x = torch::linear(torch::tanh(x), m.w);
    ++ends;
    return x + 1;
  });
  set_recompute(net);
  net(input()).sum().backward();
  EXPECT_EQ(ends, 2) << "what follows the last saved tensor ran again";
  // A Unit that saves nothing but its inputs and parameters does not run again at all.
  Pair linear([](AnyImpl& m, at::Tensor x) { return torch::linear(x, m.w, m.b); });
  set_recompute(linear);
  linear(input().requires_grad_()).sum().backward();
  EXPECT_EQ(linear->a->calls + linear->b->calls, 2);
}

TEST(Recompute, AUnitInsideAnotherGoesWithIt) {
  struct OuterImpl : torch::nn::Module {
    OuterImpl() { inner = register_module("inner", Unit<Any>()); }
    at::Tensor forward(const at::Tensor& x) { return torch::tanh(inner(torch::tanh(x))); }
    Unit<Any> inner{nullptr};
  };
  torch::nn::Sequential net{Unit<OuterImpl>()};
  auto* outer = net[0]->as<Unit<OuterImpl>::Impl>();
  net->forward(input()).sum().backward();
  const auto plain = gradients(*net);
  EXPECT_EQ(set_recompute(net), 2);
  net->forward(input()).sum().backward();
  expect_equal(gradients(*net), plain);
  EXPECT_EQ(outer->inner->calls, 3);
  EXPECT_EQ(outer->inner->count.item<int64_t>(), 2);
}

TEST(Recompute, WhatCannotWorkIsRefusedByName) {
  const auto backward = [](Forward fn, const std::function<void(Pair&, const at::Tensor&)>& between = {}) {
    return refused([&] {
      Pair net(fn);
      set_recompute(net);
      const at::Tensor x = input(), y = net(x);
      if (between) between(net, x);
      y.sum().backward();
    });
  };
  const Forward plain = [](AnyImpl& m, at::Tensor x) { return torch::tanh(torch::linear(torch::tanh(x), m.w, m.b)); };
  EXPECT_EQ(backward(plain), "not refused");
  EXPECT_THAT(backward([](AnyImpl& m, at::Tensor x) { return torch::linear(x.add_(1), m.w); }),
              ::testing::AllOf(HasSubstr("unit 'a' is recomputed"), HasSubstr("changes its input [5, 6] Double in place")));
  EXPECT_THAT(backward(plain, [](Pair&, const at::Tensor& x) { x.add_(1); }), HasSubstr("modified by an in-place operation"));
  EXPECT_THAT(backward(plain,
                       [](Pair& net, const at::Tensor&) {
                         const torch::NoGradGuard no_grad;
                         net->b->b.add_(1);  // a bias is never saved, and changes what is computed again
                       }),
              ::testing::AllOf(HasSubstr("unit 'b'"), HasSubstr("modified by an in-place operation")));
  EXPECT_THAT(backward([](AnyImpl& m, at::Tensor x) { return m.calls % 2 == 0 ? torch::linear(x, m.w) : torch::tanh(torch::linear(torch::tanh(x), m.w)); }),
              HasSubstr("its second forward saved 0 tensors where the first one saved at least"));
  EXPECT_THAT(backward([](AnyImpl& m, at::Tensor x) {
                const at::Tensor y = m.calls % 2 == 0 ? torch::cat({x, x}) : x;
                return torch::tanh(torch::linear(y, m.w)).narrow(0, 0, 5);
              }),
              HasSubstr("saved tensor 0 is [10, 6] Double in its second forward and was [5, 6] Double in the first"));
  EXPECT_THAT(backward([](AnyImpl& m, at::Tensor x) {
                const at::Tensor inside = torch::tanh(torch::linear(x, m.w));
                return torch::autograd::grad({inside.sum()}, {m.w}, {}, true, true)[0].sum() + inside;
              }),
              HasSubstr("a gradient is taken inside its forward"));
  EXPECT_THAT(backward([](AnyImpl& m, at::Tensor x) {
                const at::Tensor y = autograd::part(autograd::Part::attention, {x}, [x, w = m.w] { return torch::linear(x, w); });
                return torch::tanh(torch::tanh(y));
              }),
              HasSubstr("not refused"));

  struct MovesImpl : torch::nn::Module {
    at::Tensor forward(std::unique_ptr<at::Tensor> x) { return x->tanh(); }
  };
  Unit<MovesImpl> moves;
  set_recompute(*moves);
  EXPECT_THAT(refused([&] { moves(std::make_unique<at::Tensor>(input().requires_grad_())); }), HasSubstr("an argument that has no copy"));

  Pair net;
  EXPECT_THAT(refused([&] { set_recompute(net, {.units = "layers.*"}); }), HasSubstr("no such Unit. Its Units: a, b"));
  EXPECT_THAT(refused([&] { set_recompute(net, {.every = 0}); }), HasSubstr("every 0 Units"));
  EXPECT_THAT(refused([] { recompute_of_name("some"); }), HasSubstr("none, attention, keep_matmuls, half, keep_attention, full"));
  offload_activations(net, "b");
  EXPECT_THAT(refused([&] { set_recompute(net); }), HasSubstr("unit 'b' keeps its activations on the host"));
  EXPECT_EQ(set_recompute(net, {.units = "a"}), 1);
  EXPECT_THAT(refused([&] { offload_activations(net); }), HasSubstr("unit 'a' is recomputed"));
}

TEST(Recompute, AModuleThatIsGoneIsNamed) {
  at::Tensor y;
  {
    Pair net;
    set_recompute(net);
    y = net(input()).sum();
  }
  EXPECT_THAT(refused([&] { y.backward(); }), HasSubstr("its module is gone"));
}

TEST(Recompute, EverySecondUnit) {
  torch::nn::Sequential net{Unit<Any>(), Unit<Any>(), Unit<Any>()};
  EXPECT_EQ(set_recompute(net, {.every = 2}), 2);
  net->forward(input()).sum().backward();
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(net[i]->as<Unit<Any>::Impl>()->again, i == 1 ? 0 : 1) << i;
}

TEST(Recompute, ClonesKeepTheSetting) {
  torch::nn::Sequential net{Unit<torch::nn::BatchNorm1d>(torch::nn::BatchNorm1dOptions(6))};
  set_recompute(net);
  const auto copy = std::dynamic_pointer_cast<nn::UnitBase>(net[0]->clone());
  ASSERT_NE(copy, nullptr);
  EXPECT_EQ(copy->activations().recompute, Recompute::full);
}

TEST(OffloadActivations, KeepsGradientsAndFindsChanges) {
  Pair net;
  net(input()).sum().backward();
  const auto plain = gradients(*net);
  EXPECT_EQ(offload_activations(net), 2);
  const at::Tensor x = input();
  net(x).sum().backward();
  expect_equal(gradients(*net), plain);
  EXPECT_EQ(net->a->calls, 2);
  const at::Tensor y = net(x).sum();
  {
    const torch::NoGradGuard no_grad;
    net->b->w.add_(1);
  }
  EXPECT_THAT(refused([&] { y.backward(); }), HasSubstr("modified by an in-place operation"));
}

// d/dx of sum(m x w) with a mask m is linear in x, and a second derivative must see the mask.
TEST(Dropout, HasASecondDerivative) {
  const nn::Dropout dropout(0.5, 9, "layer", 4);
  const at::Tensor x = torch::ones({2, 4, 6}, torch::kDouble).requires_grad_();
  const at::Tensor y = dropout(x.square(), {});
  const at::Tensor g = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];  // 2 m x
  g.sum().backward();
  const at::Tensor mask = dropout(torch::ones({2, 4, 6}, torch::kDouble), {});
  EXPECT_TRUE(at::equal(x.grad(), 2 * mask));
  EXPECT_GT(mask.sum().item<double>(), 0);
}

}  // namespace
}  // namespace weft
