// Every collective against values computed without communication, on every back end, as threads and as processes.
#include <gtest/gtest.h>
#include <torch/types.h>

#include "tests/support/ranks.h"
#include "weft/comm/comm.h"

namespace weft {
namespace {

const std::vector<at::ScalarType> kReducible = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kChar,
                                                at::kByte,  at::kShort,  at::kInt,      at::kLong};

// Small whole numbers, so that sums and products are exact in every dtype and order.
at::Tensor data_of(int rank, std::vector<int64_t> sizes, at::ScalarType dtype, int salt = 0) {
  at::Tensor t = at::empty(sizes, at::kLong);
  auto* values = t.data_ptr<int64_t>();
  for (int64_t i = 0; i < t.numel(); ++i) values[i] = (i * 7 + rank * 3 + salt) % 3 + 1;
  return t.to(dtype);
}

void expect_equal(const at::Tensor& got, const at::Tensor& want, const std::string& what) {
  EXPECT_TRUE(got.scalar_type() == want.scalar_type() && got.sizes() == want.sizes() && at::equal(got, want))
      << what << "\n got " << got << "\nwant " << want;
}

at::Tensor reduced(int n, std::vector<int64_t> sizes, at::ScalarType dtype, ReduceOp op) {
  at::Tensor sum = data_of(0, sizes, at::kDouble);
  for (int r = 1; r < n; ++r) {
    const at::Tensor next = data_of(r, sizes, at::kDouble);
    switch (op) {
      case ReduceOp::sum:
      case ReduceOp::avg: sum = sum + next; break;
      case ReduceOp::min: sum = at::minimum(sum, next); break;
      case ReduceOp::max: sum = at::maximum(sum, next); break;
      case ReduceOp::product: sum = sum * next; break;
    }
  }
  if (op != ReduceOp::avg) return sum.to(dtype);
  if (c10::isIntegralType(dtype, false)) return (sum / n).trunc().to(dtype);
  return dtype == at::kDouble ? sum / n : (sum.to(at::kFloat) / n).to(dtype);
}

void check_reductions(const Comm& comm) {
  const int n = comm.size();
  for (const auto dtype : kReducible) {
    for (const auto op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max, ReduceOp::product}) {
      const std::string what = std::string(c10::toString(dtype)) + " op " + std::to_string(static_cast<int>(op));
      at::Tensor all = data_of(comm.rank(), {3, 5}, dtype);
      comm.all_reduce(all, op).wait();
      expect_equal(all, reduced(n, {3, 5}, dtype, op), "all_reduce " + what);
      const at::Tensor in = data_of(comm.rank(), {n * 4}, dtype);
      at::Tensor out = at::empty({2, 2}, dtype);
      comm.reduce_scatter(out, in, op).wait();
      expect_equal(out, reduced(n, {n * 4}, dtype, op).view({n, 2, 2})[comm.rank()], "reduce_scatter " + what);
    }
  }
  // In place: the output is this rank's part of the input.
  at::Tensor in = data_of(comm.rank(), {n, 6}, at::kFloat);
  comm.reduce_scatter(in[comm.rank()], in).wait();
  expect_equal(in[comm.rank()], reduced(n, {n, 6}, at::kFloat, ReduceOp::sum)[comm.rank()], "reduce_scatter in place");
  // Truth values: sum and max are "or", product and min are "and".
  at::Tensor any = at::full({2}, comm.rank() == 0, at::kBool), all = any.clone();
  comm.all_reduce(any).wait();
  comm.all_reduce(all, ReduceOp::product).wait();
  expect_equal(any, at::ones({2}, at::kBool), "bool sum");
  expect_equal(all, at::full({2}, n == 1, at::kBool), "bool product");
}

void check_moves(const Comm& comm) {
  const int n = comm.size(), me = comm.rank();
  auto dtypes = kReducible;
  dtypes.push_back(at::kBool);
  dtypes.push_back(at::kComplexFloat);
  for (const auto dtype : dtypes) {
    const std::string what = c10::toString(dtype);
    at::Tensor gathered = at::empty({n * 2, 3}, dtype);
    comm.all_gather(gathered, data_of(me, {2, 3}, dtype)).wait();
    for (int r = 0; r < n; ++r) expect_equal(gathered.slice(0, 2 * r, 2 * r + 2), data_of(r, {2, 3}, dtype), "all_gather " + what);

    for (int root = 0; root < n; ++root) {
      at::Tensor t = data_of(me, {7}, dtype);
      comm.broadcast(t, root).wait();
      expect_equal(t, data_of(root, {7}, dtype), "broadcast " + what);
    }

    at::Tensor in = at::empty({n * 2, 2}, dtype), out = at::empty({n * 2, 2}, dtype);
    for (int r = 0; r < n; ++r) in.slice(0, 2 * r, 2 * r + 2).copy_(data_of(me, {2, 2}, dtype, r));
    comm.all_to_all(out, in).wait();
    for (int r = 0; r < n; ++r) expect_equal(out.slice(0, 2 * r, 2 * r + 2), data_of(r, {2, 2}, dtype, me), "all_to_all " + what);

    if (n == 1) continue;
    const int next = (me + 1) % n, previous = (me + n - 1) % n;
    at::Tensor first = at::empty({3}, dtype), second = at::empty({2}, dtype);
    Work send_first = comm.send(data_of(me, {3}, dtype), next), send_second = comm.send(data_of(me, {2}, dtype, 1), next);
    comm.recv(first, previous).wait();
    comm.recv(second, previous).wait();
    send_first.wait();
    send_second.wait();
    expect_equal(first, data_of(previous, {3}, dtype), "first message " + what);
    expect_equal(second, data_of(previous, {2}, dtype, 1), "second message " + what);
  }
}

// Rank a sends (a + 2b) % 4 rows to rank b: zeros and unequal counts; with two ranks also the splits 0,3 / 5,0.
void check_uneven(const Comm& comm) {
  const int n = comm.size(), me = comm.rank();
  const auto check = [&](const std::function<int64_t(int, int)>& rows) {
    std::vector<int64_t> in_rows, out_rows;
    std::vector<at::Tensor> in_parts, out_parts;
    for (int r = 0; r < n; ++r) {
      in_rows.push_back(rows(me, r));
      out_rows.push_back(rows(r, me));
      in_parts.push_back(data_of(me, {in_rows.back(), 3}, at::kBFloat16, r));
      out_parts.push_back(data_of(r, {out_rows.back(), 3}, at::kBFloat16, me));
    }
    const at::Tensor want = at::cat(out_parts);
    at::Tensor out = at::empty_like(want);
    comm.all_to_all(out, at::cat(in_parts), out_rows, in_rows).wait();
    expect_equal(out, want, "uneven all_to_all");
  };
  check([](int a, int b) { return (a + 2 * b) % 4; });
  check([](int, int) { return 0; });
  if (n == 2) check([](int a, int b) { return a == 0 ? (b == 0 ? 0 : 3) : (b == 0 ? 5 : 0); });
}

void check_edges(const Comm& comm) {
  const int n = comm.size();
  at::Tensor none = at::empty({0});
  comm.all_reduce(none).wait();
  comm.all_gather(none, none).wait();
  at::Tensor scalar = at::full({}, 2.5);
  comm.all_reduce(scalar).wait();
  EXPECT_EQ(scalar.item<double>(), 2.5 * n);
  // Rounded once: adding 1 to 256 step by step in bf16 would stay at 256.
  at::Tensor sum = at::full({1}, comm.rank() == 0 ? 256.0 : 1.0, at::kBFloat16);
  comm.all_reduce(sum).wait();
  EXPECT_EQ(sum.item<float>(), at::full({}, 256.0 + (n - 1)).to(at::kBFloat16).item<float>());
  comm.barrier();
  std::vector<std::string> want;
  for (int r = 0; r < n; ++r) want.push_back(std::string(static_cast<size_t>(r * 3), 'x'));
  EXPECT_EQ(comm.all_gather_text(want[static_cast<size_t>(comm.rank())]), want);
}

void check_everything(const Comm& comm) {
  check_reductions(comm);
  check_moves(comm);
  check_uneven(comm);
  check_edges(comm);
}

const ::weft::testing::RankBody kEverything("everything", [](World& world, const std::string&) {
  check_everything(world.comm());
  check_everything(world.comm().split(world.rank() % 2, -world.rank(), "parity"));
  return std::string("done");
});

class OnThreads : public ::testing::TestWithParam<std::tuple<BackendKind, int>> {};
class OnProcesses : public ::testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(OnThreads, EveryCollectiveGivesTheReferenceValues) {
  const auto [backend, n] = GetParam();
  testing::on_threads(n, [](World& world) {
    check_everything(world.comm());
    check_everything(world.comm().split(world.rank() % 2, -world.rank(), "parity"));
  }, backend);
}

TEST_P(OnProcesses, EveryCollectiveGivesTheReferenceValues) {
  const auto& [backend, n] = GetParam();
  for (const auto& result : testing::on_processes(n, "everything", "", backend)) {
    EXPECT_EQ(result.exit_code, 0) << result.result;
    EXPECT_EQ(result.result, "done");
  }
}

std::string name_of(BackendKind backend) { return backend == BackendKind::local ? "local" : "gloo"; }

INSTANTIATE_TEST_SUITE_P(Comm, OnThreads,
                         ::testing::Combine(::testing::Values(BackendKind::local, BackendKind::gloo), ::testing::Values(1, 2, 3, 4)),
                         [](const auto& info) { return name_of(std::get<0>(info.param)) + std::to_string(std::get<1>(info.param)); });
INSTANTIATE_TEST_SUITE_P(Comm, OnProcesses,
                         ::testing::Combine(::testing::Values("local", "gloo"), ::testing::Values(1, 2, 3)),
                         [](const auto& info) { return std::get<0>(info.param) + std::to_string(std::get<1>(info.param)); });

}  // namespace
}  // namespace weft
