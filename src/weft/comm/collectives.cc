// The calls of Comm that communicate.
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "weft/comm/calls.h"
#include "weft/comm/check.h"
#include "weft/comm/cross_check.h"
#include "weft/comm/gloo.h"
#include "weft/comm/local/local.h"
#include "weft/comm/wire.h"

namespace weft {
namespace {

using detail::begin;
using detail::Call;
using detail::CommOp;
using detail::CommState;
using detail::finished;
using detail::launch;
using detail::launch_local;

local::Reduce to_local(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum: return local::Reduce::sum;
    case ReduceOp::avg: return local::Reduce::avg;
    case ReduceOp::min: return local::Reduce::min;
    case ReduceOp::max: return local::Reduce::max;
    case ReduceOp::product: return local::Reduce::product;
  }
  return local::Reduce::none;
}

void copy_part(const at::Tensor& to, const at::Tensor& from) {
  if (to.data_ptr() != from.data_ptr() || to.is_meta()) detail::copy_quietly(to, from);
}

int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

// Gloo refuses tensors without elements; on every back end such a call has nothing to do.
bool nothing_to_move(const CommState& comm, const at::Tensor& tensor) { return !comm.backend || tensor.numel() == 0; }

c10::intrusive_ptr<c10d::Work> pollable(const CommState& comm, c10::intrusive_ptr<c10d::Work> message) {
  return comm.gloo ? detail::pollable_message(comm.backend, std::move(message)) : message;
}

}  // namespace

Work Comm::all_reduce(at::Tensor tensor, ReduceOp op) const {
  auto& comm = *state_;
  detail::check_tensor(comm, CommOp::all_reduce, tensor, "");
  detail::check_reducible(comm, CommOp::all_reduce, tensor, op);
  const int n = size();
  if (n == 1) return {};
  const int64_t bytes = bytes_of(tensor);
  const Call call = begin(comm, {.op = CommOp::all_reduce, .tensor = &tensor, .bytes = bytes, .sent = 2 * (n - 1) * bytes / n,
                                 .reduce = op});
  if (nothing_to_move(comm, tensor)) return finished(comm, call);
  if (comm.local) return launch_local(state_, call, [&] { return comm.local->start_all_reduce(tensor, to_local(op), comm.timeout); });
  c10d::AllreduceOptions options;
  options.timeout = detail::kBackgroundTimeout;
  options.reduceOp = detail::to_c10d(op);
  if (!comm.gloo) {
    std::vector<at::Tensor> tensors{tensor};
    return launch(state_, call, {}, [&] { return comm.backend->allreduce(tensors, options); });
  }
  auto wire = detail::gloo_reduction(tensor, op);
  options.reduceOp = wire.op;
  std::vector<at::Tensor> tensors{wire.tensor};
  return launch(state_, call, {tensor}, [&] { return comm.backend->allreduce(tensors, options); },
                [=] { detail::finish_gloo_reduction(tensor, wire.tensor, op, n); });
}

Work Comm::all_gather(at::Tensor out, at::Tensor in) const {
  auto& comm = *state_;
  const int n = size();
  detail::check_pair(comm, CommOp::all_gather, out, in, n, 1);
  if (n == 1) {
    copy_part(out, in);
    return {};
  }
  const int64_t bytes = bytes_of(out);
  const Call call = begin(comm, {.op = CommOp::all_gather, .tensor = &in, .bytes = bytes, .sent = (n - 1) * bytes / n});
  if (nothing_to_move(comm, in)) {
    // A rehearsal: every rank has what this one has.
    for (int r = 0; r < n && in.numel() > 0; ++r) copy_part(out.view({n, -1}).select(0, r), in.view({-1}));
    return finished(comm, call);
  }
  if (comm.local) return launch_local(state_, call, [&] { return comm.local->start_all_gather(out, in, comm.timeout); });
  c10d::AllgatherOptions options;
  options.timeout = detail::kBackgroundTimeout;
  at::Tensor wire_out = comm.gloo ? detail::as_bytes(out) : out;
  at::Tensor wire_in = comm.gloo ? detail::as_bytes(in) : in;
  return launch(state_, call, {out, in}, [&] { return comm.backend->_allgather_base(wire_out, wire_in, options); });
}

Work Comm::reduce_scatter(at::Tensor out, at::Tensor in, ReduceOp op) const {
  auto& comm = *state_;
  const int n = size();
  detail::check_pair(comm, CommOp::reduce_scatter, out, in, 1, n);
  detail::check_reducible(comm, CommOp::reduce_scatter, in, op);
  if (n == 1) {
    copy_part(out, in);
    return {};
  }
  const int64_t bytes = bytes_of(in);
  const Call call = begin(comm, {.op = CommOp::reduce_scatter, .tensor = &in, .bytes = bytes, .sent = (n - 1) * bytes / n,
                                 .reduce = op});
  if (nothing_to_move(comm, in)) {
    if (in.numel() > 0) copy_part(out.view({-1}), in.view({n, -1}).select(0, rank()));
    return finished(comm, call);
  }
  if (comm.local) {
    return launch_local(state_, call, [&] { return comm.local->start_reduce_scatter(out, in, to_local(op), comm.timeout); });
  }
  if (!comm.gloo) {
    c10d::ReduceScatterOptions options;
    options.timeout = detail::kBackgroundTimeout;
    options.reduceOp = detail::to_c10d(op);
    return launch(state_, call, {out, in}, [&] { return comm.backend->_reduce_scatter_base(out, in, options); });
  }
  // Gloo's own is an all-reduce of everything. Exchanging the parts moves half of that, and they are added in rank order.
  at::Tensor parts = at::empty({n, out.numel()}, in.options());
  at::Tensor wire_out = detail::as_bytes(parts);
  at::Tensor wire_in = detail::as_bytes(in);
  std::vector<int64_t> part_bytes(static_cast<size_t>(n), bytes / n);
  return launch(state_, call, {parts, in},
                [&] { return comm.backend->alltoall_base(wire_out, wire_in, part_bytes, part_bytes, {}); },
                [=] { detail::reduce_parts(out, parts, op); });
}

Work Comm::all_to_all(at::Tensor out, at::Tensor in) const {
  const int n = size();
  detail::check_pair(*state_, CommOp::all_to_all, out, in, 1, 1);
  if (in.dim() == 0 || out.dim() == 0 || in.size(0) % n != 0 || out.size(0) % n != 0) {
    throw ConfigError(fmt::format("all_to_all in group '{}': {} and {} rows do not split evenly over {} ranks; pass the rows "
                                  "of each rank", name(), in.dim() ? in.size(0) : 0, out.dim() ? out.size(0) : 0, n));
  }
  return all_to_all(out, in, std::vector<int64_t>(static_cast<size_t>(n), out.size(0) / n),
                    std::vector<int64_t>(static_cast<size_t>(n), in.size(0) / n));
}

Work Comm::all_to_all(at::Tensor out, at::Tensor in, std::vector<int64_t> out_rows, std::vector<int64_t> in_rows) const {
  auto& comm = *state_;
  detail::check_tensor(comm, CommOp::all_to_all, out, "output");
  detail::check_tensor(comm, CommOp::all_to_all, in, "input");
  detail::check_rows(comm, out, out_rows, "output");
  detail::check_rows(comm, in, in_rows, "input");
  detail::check_row_sizes(comm, out, in);
  const auto me = static_cast<size_t>(rank());
  if (size() == 1) {
    copy_part(out, in);
    return {};
  }
  const int64_t row_bytes = in.size(0) > 0 ? bytes_of(in) / in.size(0) : 0;
  const Call call = begin(comm, {.op = CommOp::all_to_all, .tensor = comm.core->debug_level >= 2 ? nullptr : &in,
                                 .bytes = bytes_of(in), .sent = row_bytes * (in.size(0) - in_rows[me])});
  if (!comm.backend) {
    // A rehearsal: as if every peer had sent zeros, but for what this rank keeps.
    const at::NoGradGuard no_grad;
    out.variable_data().zero_();
    return finished(comm, call);
  }
  if (comm.core->debug_level >= 2) detail::cross_check_rows(comm, call, out_rows, in_rows);
  if (comm.local) {
    return launch_local(state_, call, [&] { return comm.local->start_all_to_all(out, in, out_rows, in_rows, comm.timeout); });
  }
  c10d::AllToAllOptions options;
  options.timeout = detail::kBackgroundTimeout;
  at::Tensor wire_out = out;
  at::Tensor wire_in = in;
  if (comm.gloo) {
    const int64_t out_row_bytes = out.size(0) > 0 ? bytes_of(out) / out.size(0) : 0;
    wire_out = detail::as_bytes(out);
    wire_in = detail::as_bytes(in);
    for (auto& rows : out_rows) rows *= out_row_bytes;
    for (auto& rows : in_rows) rows *= row_bytes;
  }
  return launch(state_, call, {out, in},
                [&] { return comm.backend->alltoall_base(wire_out, wire_in, out_rows, in_rows, options); });
}

Work Comm::broadcast(at::Tensor tensor, int root) const {
  auto& comm = *state_;
  detail::check_tensor(comm, CommOp::broadcast, tensor, "");
  detail::check_rank(comm, CommOp::broadcast, root, "root");
  if (size() == 1) return {};
  const Call call = begin(comm, {.op = CommOp::broadcast, .tensor = &tensor, .peer = root, .bytes = bytes_of(tensor),
                                 .sent = bytes_of(tensor)});
  if (nothing_to_move(comm, tensor)) return finished(comm, call);
  if (comm.local) return launch_local(state_, call, [&] { return comm.local->start_broadcast(tensor, root, comm.timeout); });
  c10d::BroadcastOptions options;
  options.timeout = detail::kBackgroundTimeout;
  options.rootRank = root;
  std::vector<at::Tensor> tensors{comm.gloo ? detail::as_bytes(tensor) : tensor};
  return launch(state_, call, {tensor}, [&] { return comm.backend->broadcast(tensors, options); });
}

Work Comm::send(at::Tensor tensor, int peer) const {
  auto& comm = *state_;
  detail::check_tensor(comm, CommOp::send, tensor, "");
  detail::check_rank(comm, CommOp::send, peer, "receiver");
  const Call call = begin(comm, {.op = CommOp::send, .tensor = &tensor, .peer = peer, .bytes = bytes_of(tensor),
                                 .sent = bytes_of(tensor)});
  if (nothing_to_move(comm, tensor)) return finished(comm, call);
  if (comm.local) return launch_local(state_, call, [&] { return comm.local->start_send(tensor, peer, comm.timeout); });
  std::vector<at::Tensor> tensors{comm.gloo ? detail::as_bytes(tensor) : tensor};
  return launch(state_, call, {tensor}, [&] { return pollable(comm, comm.backend->send(tensors, peer, 0)); });
}

Work Comm::recv(at::Tensor tensor, int peer) const {
  auto& comm = *state_;
  detail::check_tensor(comm, CommOp::recv, tensor, "");
  detail::check_rank(comm, CommOp::recv, peer, "sender");
  const Call call = begin(comm, {.op = CommOp::recv, .tensor = &tensor, .peer = peer, .bytes = bytes_of(tensor)});
  if (nothing_to_move(comm, tensor)) {
    const at::NoGradGuard no_grad;
    tensor.variable_data().zero_();
    return finished(comm, call);
  }
  if (comm.local) return launch_local(state_, call, [&] { return comm.local->start_recv(tensor, peer, comm.timeout); });
  std::vector<at::Tensor> tensors{comm.gloo ? detail::as_bytes(tensor) : tensor};
  return launch(state_, call, {tensor}, [&] { return pollable(comm, comm.backend->recv(tensors, peer, 0)); });
}

void Comm::barrier() const {
  auto& comm = *state_;
  if (size() == 1) return;
  const Call call = begin(comm, {.op = CommOp::barrier});
  if (!comm.backend) {
    finished(comm, call).wait();
    return;
  }
  if (comm.local) {
    launch_local(state_, call, [&] { return comm.local->start_barrier(comm.timeout); }).wait();
    return;
  }
  c10d::BarrierOptions options;
  options.timeout = detail::kBackgroundTimeout;
  launch(state_, call, {}, [&] { return comm.backend->barrier(options); }).wait();
}

}  // namespace weft
