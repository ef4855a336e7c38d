#include "weft/parallel/reduce_hook.h"

#include <ATen/ATen.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <vector>

#include "weft/core/error.h"

namespace weft {
namespace {

/// One bucket's memory on the wire.
struct Wire {
  at::Tensor all;   // [ranks * n]: gradients, padded so that they cut into equal parts
  at::Tensor mine;  // [n]: this rank's part of the result
};

Wire make_wire(const BucketReduction& call, at::ScalarType dtype) {
  const int64_t ranks = call.comm.size(), part = (call.gradients.numel() + ranks - 1) / ranks;
  const at::TensorOptions options = call.gradients.options().dtype(dtype);
  return {call.comm.allocate({ranks * part}, options).zero_(), call.comm.allocate({part}, options)};
}

}  // namespace

bool can_travel_as(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kFloat || dtype == at::kDouble;
}

ReduceHook reduce_as(at::ScalarType dtype) {
  if (!can_travel_as(dtype)) throw ConfigError(std::string("reduce_dtype is ") + c10::toString(dtype) + "; " + kWireDtypes);
  auto wires = std::make_shared<std::vector<Wire>>();
  return [wires, dtype](const BucketReduction& call) -> std::function<void()> {
    const at::NoGradGuard no_grad;
    const auto index = static_cast<size_t>(call.bucket);
    if (index == wires->size()) wires->push_back(make_wire(call, dtype));
    const Wire wire = wires->at(index);
    const at::Tensor used = wire.all.narrow(0, 0, call.gradients.numel());
    used.copy_(call.gradients);
    auto scattered = std::make_shared<Work>(call.comm.reduce_scatter(wire.mine, wire.all, call.op));
    return [=, gradients = call.gradients, comm = call.comm] {
      const at::NoGradGuard no_grad;
      scattered->released();
      comm.all_gather(wire.all, wire.mine).released();
      gradients.copy_(used);
    };
  };
}

}  // namespace weft
