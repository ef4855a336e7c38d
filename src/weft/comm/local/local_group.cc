// LocalGroup: c10d calls on tensors become Ops of the engine.
#include <fmt/format.h>

#include <numeric>

#include "weft/comm/local/engine.h"
#include "weft/comm/local/local.h"
#include "weft/comm/local/reduce.h"
#include "weft/memory/account.h"

namespace weft::local {
namespace {

using std::chrono::milliseconds;

/// A call that keeps its tensors alive.
struct TensorOp : Op {
  at::Tensor first, second;
};

/// An all-gather whose parts go to tensors of their own.
struct ListGatherOp : TensorOp {
  std::vector<at::Tensor> parts;
  void on_complete() override {
    for (size_t r = 0; r < parts.size(); ++r) parts[r].copy_(second[static_cast<int64_t>(r)].view_as(parts[r]));
  }
};

Dtype dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return Dtype::f32;
    case at::kDouble: return Dtype::f64;
    case at::kBFloat16: return Dtype::bf16;
    case at::kHalf: return Dtype::f16;
    case at::kChar: return Dtype::i8;
    case at::kByte: return Dtype::u8;
    case at::kShort: return Dtype::i16;
    case at::kInt: return Dtype::i32;
    case at::kLong: return Dtype::i64;
    case at::kBool: return Dtype::boolean;
    default: return Dtype::other;
  }
}

Reduce reduction_of(const c10d::ReduceOp& op) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM: return Reduce::sum;
    case c10d::ReduceOp::AVG: return Reduce::avg;
    case c10d::ReduceOp::MIN: return Reduce::min;
    case c10d::ReduceOp::MAX: return Reduce::max;
    case c10d::ReduceOp::PRODUCT: return Reduce::product;
    default: throw ConfigError("this reduction is not one of sum, avg, min, max, product");
  }
}

void check_reducible(const at::Tensor& tensor, Reduce reduction) {
  if (can_reduce(dtype_of(tensor), reduction)) return;
  throw ConfigError(fmt::format("{} of {} cannot be reduced; convert the tensor", name_of(reduction), c10::toString(tensor.scalar_type())));
}

void check_tensor(const at::Tensor& tensor, const char* role) {
  if (!tensor.defined()) throw ConfigError(fmt::format("{} is an undefined tensor", role));
  if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided || !tensor.is_contiguous()) {
    throw ConfigError(fmt::format("{} is not a contiguous dense CPU tensor; call .contiguous() or move it to the CPU", role));
  }
}

const at::Tensor& only(const std::vector<at::Tensor>& tensors) {
  if (tensors.size() != 1) throw ConfigError(fmt::format("{} tensors in one call; the local back end takes one", tensors.size()));
  check_tensor(tensors[0], "tensor");
  return tensors[0];
}

void check_pair(const at::Tensor& output, const at::Tensor& input) {
  check_tensor(output, "output");
  check_tensor(input, "input");
  if (output.scalar_type() != input.scalar_type()) {
    throw ConfigError(fmt::format("output is {}, input {}; they must be the same", c10::toString(output.scalar_type()),
                                  c10::toString(input.scalar_type())));
  }
}

void check_ratio(int64_t large, int64_t small, int size, const char* call) {
  if (large != small * size) {
    throw ConfigError(fmt::format("{}: {} elements against {} x {} ranks = {}", call, large, small, size, small * size));
  }
}

char* data_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

/// Makes `op` a call whose size is that of `tensor`.
void describe(TensorOp& op, Call call, const at::Tensor& tensor) {
  op.call = call;
  op.dtype = dtype_of(tensor);
  op.bytes = tensor.nbytes();
  op.count = op.dtype == Dtype::other ? op.bytes : static_cast<uint64_t>(tensor.numel());
  op.first = tensor;
  op.input = op.output = data_of(tensor);
}

std::shared_ptr<TensorOp> new_op(Call call, const at::Tensor& tensor) {
  auto op = std::make_shared<TensorOp>();
  describe(*op, call, tensor);
  return op;
}

std::vector<uint64_t> bytes_of_splits(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size, const char* role) {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  std::vector<int64_t> counts = splits;
  if (counts.empty()) {
    if (rows % size != 0) throw ConfigError(fmt::format("all_to_all: {} rows of {} do not divide over {} ranks", rows, role, size));
    counts.assign(static_cast<size_t>(size), rows / size);
  }
  if (counts.size() != static_cast<size_t>(size) || std::accumulate(counts.begin(), counts.end(), int64_t{0}) != rows) {
    throw ConfigError(fmt::format("all_to_all: the {} splits of {} must be one per rank ({}) and sum to its {} rows", counts.size(), role,
                                  size, rows));
  }
  const uint64_t row_bytes = rows == 0 ? 0 : tensor.nbytes() / static_cast<uint64_t>(rows);
  std::vector<uint64_t> bytes;
  for (int64_t count : counts) {
    if (count < 0) throw ConfigError(fmt::format("all_to_all: a split of {} is {}; splits count rows", role, count));
    bytes.push_back(static_cast<uint64_t>(count) * row_bytes);
  }
  return bytes;
}

}  // namespace

LocalGroup::LocalGroup(std::shared_ptr<Engine> engine, std::shared_ptr<Group> group)
    : c10d::Backend(group->info().me, group->size()), engine_(std::move(engine)), group_(std::move(group)) {}

LocalGroup::~LocalGroup() { group_.reset(); }

const std::vector<int>& LocalGroup::world_ranks() const { return group_->info().world_ranks; }
const std::string& LocalGroup::name() const { return group_->info().name; }

std::shared_ptr<Op> LocalGroup::launch(Lane& lane, std::shared_ptr<Op> op, milliseconds timeout) {
  op->timeout = timeout > milliseconds(0) ? timeout : timeout_;
  engine_->start(lane, op);
  return op;
}

at::Tensor LocalGroup::allocate(at::IntArrayRef sizes, at::ScalarType dtype) {
  int64_t elements = 1;
  for (int64_t size : sizes) {
    if (size < 0) throw ConfigError(fmt::format("allocate: a size is {}", size));
    elements *= size;
  }
  const size_t bytes = static_cast<size_t>(elements) * c10::elementSize(dtype);
  auto block = engine_->allocate(*group_, bytes, timeout_);
  auto booking = std::make_shared<memory::Booking>(static_cast<int64_t>(bytes), memory::Category::communication);
  char* data = block->mine;
  return at::from_blob(data, sizes, [block = std::move(block), booking = std::move(booking)](void*) { block->release(); },
                       at::TensorOptions().dtype(dtype));
}

void LocalGroup::progress() { engine_->progress(); }

bool LocalGroup::test(Op& op, Until until) { return engine_->test(op, until); }
void LocalGroup::wait(Op& op, Until until) { engine_->wait(op, until, milliseconds(0)); }
bool LocalGroup::wait_unless_needed(Op& op) { return engine_->wait_unless_needed(op); }

std::shared_ptr<Op> LocalGroup::start_all_reduce(const at::Tensor& tensor, Reduce reduction, milliseconds timeout) {
  check_tensor(tensor, "tensor");
  check_reducible(tensor, reduction);
  auto op = new_op(Call::all_reduce, tensor);
  op->reduction = reduction;
  return launch(group_->collectives(), std::move(op), timeout);
}

std::shared_ptr<Op> LocalGroup::start_all_gather(const at::Tensor& output, const at::Tensor& input, milliseconds timeout) {
  check_pair(output, input);
  check_ratio(output.numel(), input.numel(), size_, "all_gather");
  auto op = new_op(Call::all_gather, input);
  op->second = output;
  op->output = data_of(output);
  return launch(group_->collectives(), std::move(op), timeout);
}

std::shared_ptr<Op> LocalGroup::start_reduce_scatter(const at::Tensor& output, const at::Tensor& input, Reduce reduction,
                                                     milliseconds timeout) {
  check_pair(output, input);
  check_ratio(input.numel(), output.numel(), size_, "reduce_scatter");
  check_reducible(output, reduction);
  auto op = new_op(Call::reduce_scatter, output);
  op->reduction = reduction;
  op->second = input;
  op->input = data_of(input);
  return launch(group_->collectives(), std::move(op), timeout);
}

std::shared_ptr<Op> LocalGroup::start_all_to_all(const at::Tensor& output, const at::Tensor& input,
                                                 const std::vector<int64_t>& output_splits, const std::vector<int64_t>& input_splits,
                                                 milliseconds timeout) {
  check_pair(output, input);
  auto op = new_op(Call::all_to_all, input);
  op->count = 0;  // differs between ranks; what a rank sends is compared with what its peer expects
  op->send_bytes = bytes_of_splits(input, input_splits, size_, "input");
  op->receive_bytes = bytes_of_splits(output, output_splits, size_, "output");
  op->second = output;
  op->output = data_of(output);
  return launch(group_->collectives(), std::move(op), timeout);
}

std::shared_ptr<Op> LocalGroup::start_broadcast(const at::Tensor& tensor, int root, milliseconds timeout) {
  check_tensor(tensor, "tensor");
  auto op = new_op(Call::broadcast, tensor);
  op->root = member(root, "root");
  return launch(group_->collectives(), std::move(op), timeout);
}

std::shared_ptr<Op> LocalGroup::start_send(const at::Tensor& tensor, int destination, milliseconds timeout, int tag) {
  check_tensor(tensor, "tensor");
  auto op = new_op(Call::message, tensor);
  op->root = tag;
  return launch(group_->outgoing(peer(destination)), std::move(op), timeout);
}

std::shared_ptr<Op> LocalGroup::start_recv(const at::Tensor& tensor, int source, milliseconds timeout, int tag) {
  check_tensor(tensor, "tensor");
  auto op = new_op(Call::message, tensor);
  op->root = tag;
  return launch(group_->incoming(peer(source)), std::move(op), timeout);
}

std::shared_ptr<Op> LocalGroup::start_barrier(milliseconds timeout) {
  return launch(group_->collectives(), std::make_shared<Op>(), timeout);
}

// --- c10d's interface ------------------------------------------------------------------------------------------------------

c10::intrusive_ptr<c10d::Work> LocalGroup::work(std::shared_ptr<Op> op, c10d::OpType type, std::vector<at::Tensor> outputs) {
  return c10::make_intrusive<LocalWork>(engine_, std::move(op), type, std::move(outputs));
}

c10::intrusive_ptr<c10d::Work> LocalGroup::allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) {
  return work(start_all_reduce(only(tensors), reduction_of(opts.reduceOp), opts.timeout), c10d::OpType::ALLREDUCE, tensors);
}

c10::intrusive_ptr<c10d::Work> LocalGroup::reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts) {
  auto op = new_op(Call::reduce, only(tensors));
  op->reduction = reduction_of(opts.reduceOp);
  check_reducible(op->first, op->reduction);
  op->root = member(opts.rootRank, "root");
  return work(launch(group_->collectives(), std::move(op), opts.timeout), c10d::OpType::REDUCE, tensors);
}

c10::intrusive_ptr<c10d::Work> LocalGroup::broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts) {
  const int root = member(opts.rootRank, "root");
  return work(start_broadcast(only(tensors), root, opts.timeout), c10d::OpType::BROADCAST, tensors);
}

c10::intrusive_ptr<c10d::Work> LocalGroup::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  return work(start_all_gather(output, input, opts.timeout), c10d::OpType::_ALLGATHER_BASE, {output});
}

c10::intrusive_ptr<c10d::Work> LocalGroup::allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                                     const c10d::AllgatherOptions& opts) {
  const at::Tensor& input = only(inputs);
  if (outputs.size() != 1 || outputs[0].size() != static_cast<size_t>(size_)) {
    throw ConfigError(fmt::format("all_gather: needs one list of {} output tensors", size_));
  }
  for (const at::Tensor& part : outputs[0]) {
    if (!part.defined() || part.scalar_type() != input.scalar_type() || part.numel() != input.numel()) {
      throw ConfigError("all_gather: every output must have the input's dtype and number of elements");
    }
  }
  auto op = std::make_shared<ListGatherOp>();
  describe(*op, Call::all_gather, input);
  op->second = at::empty({size_, input.numel()}, input.options());
  op->parts = outputs[0];
  op->output = data_of(op->second);
  return work(launch(group_->collectives(), std::move(op), opts.timeout), c10d::OpType::ALLGATHER, outputs[0]);
}

c10::intrusive_ptr<c10d::Work> LocalGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                const c10d::ReduceScatterOptions& opts) {
  return work(start_reduce_scatter(output, input, reduction_of(opts.reduceOp), opts.timeout), c10d::OpType::_REDUCE_SCATTER_BASE,
              {output});
}

c10::intrusive_ptr<c10d::Work> LocalGroup::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                                         std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) {
  return work(start_all_to_all(output, input, output_splits, input_splits, opts.timeout), c10d::OpType::ALLTOALL_BASE, {output});
}

c10::intrusive_ptr<c10d::Work> LocalGroup::send(std::vector<at::Tensor>& tensors, int destination, int tag) {
  return work(start_send(only(tensors), destination, milliseconds(0), tag), c10d::OpType::SEND, tensors);
}

c10::intrusive_ptr<c10d::Work> LocalGroup::recv(std::vector<at::Tensor>& tensors, int source, int tag) {
  return work(start_recv(only(tensors), source, milliseconds(0), tag), c10d::OpType::RECV, tensors);
}

c10::intrusive_ptr<c10d::Work> LocalGroup::barrier(const c10d::BarrierOptions& opts) {
  return work(start_barrier(opts.timeout), c10d::OpType::BARRIER, {});
}

uint64_t LocalGroup::getSequenceNumberForGroup() { return group_->collectives().next_sequence(); }

int LocalGroup::member(int64_t rank, const char* role) const {
  if (rank < 0 || rank >= size_) throw ConfigError(fmt::format("{} {} of a group of {} ranks", role, rank, size_));
  return static_cast<int>(rank);
}

int LocalGroup::peer(int rank) const {
  if (member(rank, "peer") == rank_) throw ConfigError(fmt::format("rank {} sends to or receives from itself; copy the tensor", rank));
  return rank;
}

}  // namespace weft::local
