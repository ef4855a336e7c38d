#include "weft/autograd/backward_end.h"

#include "tests/support/test_pch.h"

namespace weft::autograd {
namespace {

/// Identity whose backward runs `inside` first.
struct Probe : torch::autograd::Function<Probe> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, std::function<void()>* inside) {
    ctx->saved_data["inside"] = reinterpret_cast<int64_t>(inside);
    return x.clone();
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::tensor_list grads) {
    (*reinterpret_cast<std::function<void()>*>(ctx->saved_data["inside"].toInt()))();
    return {grads[0], at::Tensor()};
  }
};

void run_backward(std::function<void()> inside, const at::Tensor& leaf) {
  const at::AutoGradMode enable(true);
  Probe::apply(leaf * 2, &inside).sum().backward();
}

TEST(BackwardEnd, RunsOnceAfterAllGradients) {
  const at::Tensor leaf = torch::ones({2}).requires_grad_();
  int calls = 0;
  run_backward([&] { at_backward_end([&] { ++calls; EXPECT_TRUE(leaf.grad().defined()); }); }, leaf);
  EXPECT_EQ(calls, 1);
  run_backward([] {}, leaf);
  EXPECT_EQ(calls, 1);
}

TEST(BackwardEnd, NestedBackwardsWaitForTheOutermost) {
  for (const int depth : {1, 2, 5}) {
    const at::Tensor outer = torch::ones({2}).requires_grad_(), inner = torch::ones({2}).requires_grad_();
    int calls = 0;
    std::function<void()> nest = [&] { at_backward_end([&] { ++calls; EXPECT_TRUE(outer.grad().defined()); }); };
    for (int level = 0; level < depth; ++level)
      nest = [nest, &inner, &calls] { run_backward(nest, inner); EXPECT_EQ(calls, 0); };
    run_backward(nest, outer);
    EXPECT_EQ(calls, 1) << "depth " << depth;
  }
}

TEST(BackwardEnd, ItsExceptionReachesTheCaller) {
  const at::Tensor leaf = torch::ones({2}).requires_grad_();
  EXPECT_THROW(run_backward([] { at_backward_end([] { throw std::runtime_error("from the end"); }); }, leaf), std::runtime_error);
}

}  // namespace
}  // namespace weft::autograd
