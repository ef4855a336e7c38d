// Differentiable collectives against one rank that holds everybody's data and uses plain tensor operations.
#include <gtest/gtest.h>
#include <torch/types.h>

#include "tests/support/ranks.h"
#include "tests/support/tolerances.h"
#include "weft/autograd/collectives.h"
#include "weft/core/error.h"

namespace weft {
namespace {

using Tensors = std::vector<at::Tensor>;

// Known to every rank, so that each can compute the reference alone.
at::Tensor random_of(int rank, std::vector<int64_t> sizes, uint64_t salt) {
  auto generator = at::detail::createCPUGenerator(1000 * salt + static_cast<uint64_t>(rank));
  return at::randn(sizes, generator, at::kDouble);
}

void expect_close(const at::Tensor& got, const at::Tensor& want, const std::string& what) {
  ASSERT_TRUE(got.defined()) << what;
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  EXPECT_GT(want.abs().max().item<double>(), 0) << what;
  EXPECT_LT((got - want).abs().max().item<double>(), testing::kFp64Parity * want.abs().max().item<double>()) << what;
}

// Compares outputs and gradients of `op` on this rank with `reference`, which maps all ranks' inputs to all ranks' outputs.
// The job's loss is the sum over ranks of <w_r, y_r^2>: gradients depend on the values. The transposed weight makes the
// incoming gradient non-contiguous.
void check(const Comm& comm, const std::string& what, const std::vector<std::vector<int64_t>>& sizes,
           const std::function<at::Tensor(const at::Tensor&)>& op, const std::function<Tensors(const Tensors&)>& reference) {
  Tensors inputs;
  for (int r = 0; r < comm.size(); ++r) inputs.push_back(random_of(r, sizes[static_cast<size_t>(r)], 1).requires_grad_());
  const Tensors outputs = reference(inputs);
  const auto loss_of = [](const at::Tensor& y, int rank) {
    const at::Tensor w = random_of(rank, {y.size(1), y.size(0)}, 2).t();
    return (w * y * y).sum();
  };
  at::Tensor total = at::zeros({}, at::kDouble);
  for (int r = 0; r < comm.size(); ++r) total = total + loss_of(outputs[static_cast<size_t>(r)], r);
  total.backward();
  const auto me = static_cast<size_t>(comm.rank());
  at::Tensor x = inputs[me].detach().clone().requires_grad_();
  const at::Tensor y = op(x);
  expect_close(y.detach(), outputs[me].detach(), what + ", value");
  loss_of(y, comm.rank()).backward();
  expect_close(x.grad(), inputs[me].grad(), what + ", gradient");
}

Tensors repeat(const at::Tensor& t, int n) { return Tensors(static_cast<size_t>(n), t); }

at::Tensor sum(const Tensors& parts) { return at::stack(parts).sum(0); }

std::vector<std::vector<int64_t>> same(std::vector<int64_t> sizes, int n) {
  return std::vector<std::vector<int64_t>>(static_cast<size_t>(n), sizes);
}

void check_total_convention(const Comm& comm) {
  const int n = comm.size();
  check(comm, "all_reduce", same({3, 4}, n), [&](const at::Tensor& x) { return autograd::all_reduce(x, comm); },
        [&](const Tensors& xs) { return repeat(sum(xs), n); });
  for (const int64_t dim : {0, 1}) {
    check(comm, "all_gather", same({3, 4}, n), [&](const at::Tensor& x) { return autograd::all_gather(x, dim, comm); },
          [&](const Tensors& xs) { return repeat(at::cat(xs, dim), n); });
    check(comm, "reduce_scatter", same({2 * n, 3 * n}, n),
          [&](const at::Tensor& x) { return autograd::reduce_scatter(x, dim, comm); },
          [&](const Tensors& xs) { return sum(xs).chunk(n, dim); });
  }
  // Rank a sends a + b + 1 rows to b, but none to itself.
  const auto rows = [](int a, int b) { return a == b ? int64_t{0} : int64_t{a + b + 1}; };
  std::vector<std::vector<int64_t>> sizes, sent(static_cast<size_t>(n)), come(static_cast<size_t>(n));
  for (int a = 0; a < n; ++a) {
    int64_t total = 0;
    for (int b = 0; b < n; ++b) {
      sent[static_cast<size_t>(a)].push_back(rows(a, b));
      come[static_cast<size_t>(a)].push_back(rows(b, a));
      total += rows(a, b);
    }
    sizes.push_back({total, 2});
  }
  const auto me = static_cast<size_t>(comm.rank());
  check(comm, "all_to_all", sizes, [&](const at::Tensor& x) { return autograd::all_to_all(x, come[me], sent[me], comm); },
        [&](const Tensors& xs) {
          std::vector<Tensors> parts;
          for (int a = 0; a < n; ++a) parts.push_back(xs[static_cast<size_t>(a)].split_with_sizes(sent[static_cast<size_t>(a)]));
          Tensors outputs;
          for (int b = 0; b < n; ++b) {
            Tensors mine;
            for (int a = 0; a < n; ++a) mine.push_back(parts[static_cast<size_t>(a)][static_cast<size_t>(b)]);
            outputs.push_back(at::cat(mine));
          }
          return outputs;
        });
  check(comm, "sendrecv", same({3, 2}, n),
        [&](const at::Tensor& x) { return autograd::sendrecv(x, (comm.rank() + 1) % n, (comm.rank() + n - 1) % n, comm); },
        [&](const Tensors& xs) {
          Tensors outputs;
          for (int r = 0; r < n; ++r) outputs.push_back(xs[static_cast<size_t>((r + n - 1) % n)]);
          return outputs;
        });
}

// A column-parallel and a row-parallel matrix, then a replicated loss: values and all gradients equal the whole matrices'.
void check_replicated_convention(const Comm& comm) {
  const int n = comm.size();
  const at::Tensor x0 = random_of(0, {5, 4}, 3), a0 = random_of(0, {4, 3 * n}, 4), b0 = random_of(0, {3 * n, 2}, 5);
  const auto leaf = [](const at::Tensor& t) { return t.clone(at::MemoryFormat::Contiguous).requires_grad_(); };
  const at::Tensor x = leaf(x0), a = leaf(a0), b = leaf(b0);
  const at::Tensor want = x.mm(a).tanh().mm(b);
  want.square().sum().backward();
  const auto part = [&](const at::Tensor& t, int64_t dim) { return t.chunk(n, dim)[static_cast<size_t>(comm.rank())]; };

  const at::Tensor xr = leaf(x0), ar = leaf(part(a0, 1)), br = leaf(part(b0, 0));
  const at::Tensor y = autograd::reduce_from(autograd::copy_to(xr, comm).mm(ar).tanh().mm(br), comm);
  expect_close(y.detach(), want.detach(), "copy_to and reduce_from, value");
  y.square().sum().backward();
  expect_close(xr.grad(), x.grad(), "copy_to, gradient");
  expect_close(ar.grad(), part(a.grad(), 1), "column parallel weight");
  expect_close(br.grad(), part(b.grad(), 0), "row parallel weight");

  // The same through a gathered and again scattered middle.
  const at::Tensor xg = leaf(x0), ag = leaf(part(a0, 1)), bg = leaf(part(b0, 0));
  const at::Tensor middle = autograd::gather_from(autograd::copy_to(xg, comm).mm(ag), 1, comm).tanh();
  const at::Tensor yg = autograd::reduce_from(autograd::scatter_to(middle, 1, comm).mm(bg), comm);
  expect_close(yg.detach(), want.detach(), "gather_from and scatter_to, value");
  yg.square().sum().backward();
  expect_close(xg.grad(), x.grad(), "gather_from, gradient of the input");
  expect_close(ag.grad(), part(a.grad(), 1), "gather_from, gradient of the weight");
  expect_close(bg.grad(), part(b.grad(), 0), "scatter_to, gradient of the weight");
}

// d/dx of |d loss/dx|^2 through an all_reduce.
void check_double_backward(const Comm& comm) {
  const auto penalty_of = [](const at::Tensor& loss, const at::Tensor& x) {
    return torch::autograd::grad({loss}, {x}, {}, true, true)[0].square().sum();
  };
  const int n = comm.size();
  Tensors all;
  for (int r = 0; r < n; ++r) all.push_back(random_of(r, {3}, 6).requires_grad_());
  const at::Tensor total = sum(all).pow(3).sum() * n;
  at::Tensor penalties = at::zeros({}, at::kDouble);
  for (int r = 0; r < n; ++r) penalties = penalties + penalty_of(total, all[static_cast<size_t>(r)]);
  const at::Tensor want = torch::autograd::grad({penalties}, {all[static_cast<size_t>(comm.rank())]})[0];
  at::Tensor x = random_of(comm.rank(), {3}, 6).requires_grad_();
  const at::Tensor loss = autograd::all_reduce(x, comm).pow(3).sum();
  expect_close(torch::autograd::grad({penalty_of(loss, x)}, {x})[0], want, "double backward of all_reduce");
}

class Collectives : public ::testing::TestWithParam<std::tuple<BackendKind, int>> {};

TEST_P(Collectives, ValuesAndGradientsEqualOneRank) {
  const auto [backend, n] = GetParam();
  testing::on_threads(n, [](World& world) {
    check_total_convention(world.comm());
    check_replicated_convention(world.comm());
    check_double_backward(world.comm());
    EXPECT_THROW(autograd::reduce_scatter(at::ones({7 * world.size() + 1}), 0, world.comm()),
                 ConfigError);
  }, backend);
}

INSTANTIATE_TEST_SUITE_P(Autograd, Collectives,
                         ::testing::Values(std::tuple(BackendKind::local, 2), std::tuple(BackendKind::local, 3),
                                           std::tuple(BackendKind::local, 4), std::tuple(BackendKind::gloo, 2)),
                         [](const auto& info) {
                           const bool local = std::get<0>(info.param) == BackendKind::local;
                           return (local ? "local" : "gloo") + std::to_string(std::get<1>(info.param));
                         });

TEST(AutogradCollectives, OneRankIsTheIdentity) {
  const at::Tensor x = at::ones({2, 3});
  EXPECT_TRUE(autograd::all_gather(x, 1, Comm()).is_same(x));
  EXPECT_TRUE(autograd::copy_to(x, Comm()).is_same(x));
}

}  // namespace
}  // namespace weft
