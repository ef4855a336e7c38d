#include "weft/autograd/collectives.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include "weft/core/error.h"

namespace weft::autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Map = std::function<at::Tensor(const at::Tensor&)>;

struct Adjoint : torch::CustomClassHolder {
  Adjoint(Map f, Map b) : forward(std::move(f)), backward(std::move(b)) {}
  Map forward, backward;
};

// Every function here is linear: a forward map and its adjoint, each of which is the other's derivative.
struct LinearMap : torch::autograd::Function<LinearMap> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Map& map, const Map& adjoint) {
    context->saved_data["adjoint"] = c10::IValue::make_capsule(c10::make_intrusive<Adjoint>(map, adjoint));
    return map(x);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto holder = context->saved_data["adjoint"].toCapsule();
    const auto& pair = static_cast<const Adjoint&>(*holder);
    return {LinearMap::apply(gradients[0], pair.backward, pair.forward), at::Tensor(), at::Tensor()};
  }
};

void check_dim(const char* what, const at::Tensor& x, int64_t dim, const Comm& comm, bool divides) {
  if (dim < 0 || dim >= x.dim()) throw ConfigError(fmt::format("{}: dim {} of a tensor with {} dims", what, dim, x.dim()));
  if (divides && x.size(dim) % comm.size() != 0) {
    throw ConfigError(fmt::format("{} in group '{}': size {} of dim {} does not divide by its {} ranks", what, comm.name(),
                                  x.size(dim), dim, comm.size()));
  }
}

at::Tensor identity(const at::Tensor& x) { return x.view_as(x); }

at::Tensor sum(const at::Tensor& x, const Comm& comm) {
  at::Tensor total = x.clone(at::MemoryFormat::Contiguous);
  comm.all_reduce(total).wait();
  return total;
}

at::Tensor gather(const at::Tensor& x, int64_t dim, const Comm& comm) {
  const at::Tensor mine = x.contiguous();
  std::vector<int64_t> sizes = mine.sizes().vec();
  sizes.insert(sizes.begin(), comm.size());
  at::Tensor parts = at::empty(sizes, mine.options());  // [size, ..x..]
  comm.all_gather(parts, mine).wait();
  if (dim == 0) return parts.flatten(0, 1);
  return at::cat(parts.unbind(0), dim);
}

at::Tensor sum_part(const at::Tensor& x, int64_t dim, const Comm& comm) {
  const at::Tensor parts = at::stack(x.chunk(comm.size(), dim));  // [size, ..part..]
  at::Tensor out = at::empty_like(parts[0]);
  comm.reduce_scatter(out, parts).wait();
  return out;
}

at::Tensor part(const at::Tensor& x, int64_t dim, const Comm& comm) {
  return x.chunk(comm.size(), dim)[static_cast<size_t>(comm.rank())].contiguous();
}

at::Tensor exchange(const at::Tensor& x, const std::vector<int64_t>& out_rows, const std::vector<int64_t>& in_rows,
                    const Comm& comm) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes[0] = 0;
  for (const int64_t rows : out_rows) sizes[0] += rows;
  at::Tensor out = at::empty(sizes, x.options());
  comm.all_to_all(out, x.contiguous(), out_rows, in_rows).wait();
  return out;
}

at::Tensor pass(const at::Tensor& x, int to, int from, const Comm& comm) {
  at::Tensor out = at::empty_like(x, at::MemoryFormat::Contiguous);
  Work sent = comm.send(x.contiguous(), to);
  comm.recv(out, from).wait();
  sent.wait();
  return out;
}

}  // namespace

at::Tensor all_reduce(const at::Tensor& x, const Comm& comm) {
  if (comm.size() == 1) return x;
  const Map map = [comm](const at::Tensor& t) { return sum(t, comm); };
  return LinearMap::apply(x, map, map);
}

at::Tensor all_gather(const at::Tensor& x, int64_t dim, const Comm& comm) {
  check_dim("all_gather", x, dim, comm, false);
  if (comm.size() == 1) return x;
  return LinearMap::apply(x, Map([=](const at::Tensor& t) { return gather(t, dim, comm); }),
                          Map([=](const at::Tensor& g) { return sum_part(g, dim, comm); }));
}

at::Tensor reduce_scatter(const at::Tensor& x, int64_t dim, const Comm& comm) {
  check_dim("reduce_scatter", x, dim, comm, true);
  if (comm.size() == 1) return x;
  return LinearMap::apply(x, Map([=](const at::Tensor& t) { return sum_part(t, dim, comm); }),
                          Map([=](const at::Tensor& g) { return gather(g, dim, comm); }));
}

at::Tensor all_to_all(const at::Tensor& x, std::vector<int64_t> out_rows, std::vector<int64_t> in_rows, const Comm& comm) {
  check_dim("all_to_all", x, 0, comm, false);
  if (comm.size() == 1) return x;
  return LinearMap::apply(x, Map([=](const at::Tensor& t) { return exchange(t, out_rows, in_rows, comm); }),
                          Map([=](const at::Tensor& g) { return exchange(g, in_rows, out_rows, comm); }));
}

at::Tensor sendrecv(const at::Tensor& x, int to, int from, const Comm& comm) {
  if (comm.size() == 1) return x;
  return LinearMap::apply(x, Map([=](const at::Tensor& t) { return pass(t, to, from, comm); }),
                          Map([=](const at::Tensor& g) { return pass(g, from, to, comm); }));
}

at::Tensor copy_to(const at::Tensor& x, const Comm& comm) {
  if (comm.size() == 1) return x;
  return LinearMap::apply(x, Map(identity), Map([comm](const at::Tensor& g) { return sum(g, comm); }));
}

at::Tensor reduce_from(const at::Tensor& x, const Comm& comm) {
  if (comm.size() == 1) return x;
  return LinearMap::apply(x, Map([comm](const at::Tensor& t) { return sum(t, comm); }), Map(identity));
}

at::Tensor scatter_to(const at::Tensor& x, int64_t dim, const Comm& comm) {
  check_dim("scatter_to", x, dim, comm, true);
  if (comm.size() == 1) return x;
  return LinearMap::apply(x, Map([=](const at::Tensor& t) { return part(t, dim, comm); }),
                          Map([=](const at::Tensor& g) { return gather(g, dim, comm); }));
}

at::Tensor gather_from(const at::Tensor& x, int64_t dim, const Comm& comm) {
  check_dim("gather_from", x, dim, comm, false);
  if (comm.size() == 1) return x;
  return LinearMap::apply(x, Map([=](const at::Tensor& t) { return gather(t, dim, comm); }),
                          Map([=](const at::Tensor& g) { return part(g, dim, comm); }));
}

}  // namespace weft::autograd
