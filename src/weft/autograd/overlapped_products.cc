#include "weft/autograd/overlapped_products.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <functional>

#include "weft/core/error.h"
#include "weft/layout/part.h"

namespace weft::autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What a backward has to know beside tensors. biased: by product (behind an entry), whether it has a bias.
struct Setting {
  PieceExchange exchange;
  std::vector<bool> biased;
};

struct Holder : torch::CustomClassHolder {
  explicit Holder(Setting s) : setting(std::move(s)) {}
  Setting setting;
};

/// [..., D] -> [rows, D].
at::Tensor rows_of(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }

/// y [rows, out] = x weight^T + bias.
void multiply(at::Tensor y, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  bias.defined() ? at::addmm_out(y, bias, x, weight.t()) : at::mm_out(y, x, weight.t());
}

/// How [B, T of one rank, ...] is cut into pieces.
struct Cuts {
  int64_t dim, size, pieces;
  Cuts(const at::Tensor& local, int64_t asked) : dim(local.size(0) >= asked ? 0 : 1), size(local.size(dim)), pieces(std::min(asked, std::max<int64_t>(size, 1))) {}
  layout::Part operator[](int64_t piece) const { return layout::part_of(size, pieces, piece); }
};

/// Piece `part` of [B, T, D] as the ranks share T out: [B, ranks, T / ranks, D], cut in B or in T / ranks.
at::Tensor piece_of(const at::Tensor& whole, const Cuts& cuts, const layout::Part& part, int64_t ranks) {
  const at::Tensor by_rank = whole.view({whole.size(0), ranks, whole.size(1) / ranks, whole.size(2)});
  return by_rank.narrow(cuts.dim == 0 ? 0 : 2, part.begin, part.size);
}

/// Gathers x [B, T / ranks, D] piece by piece into the result [B, T, D], and writes whole weights[i]^T + biases[i] into products[i].
at::Tensor gather_and_multiply(const at::Tensor& x, const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& biases, const PieceExchange& e,
                               std::vector<at::Tensor>& products) {
  const int64_t n = e.comm.size(), batch = x.size(0), tokens = x.size(1) * n;
  const Cuts cuts(x, e.pieces);
  at::Tensor whole = at::empty({batch, tokens, x.size(2)}, x.options());
  products.clear();
  for (const at::Tensor& w : weights) products.push_back(at::empty({batch, tokens, w.size(0)}, x.options()));
  std::vector<at::Tensor> arrived;  // [ranks, piece of B, piece of T / ranks, D]
  std::vector<Work> works;
  const auto send = [&](int64_t piece) {
    if (piece == cuts.pieces) return;
    const at::Tensor mine = x.narrow(cuts.dim, cuts[piece].begin, cuts[piece].size).contiguous();
    arrived.push_back(at::empty({n, mine.size(0), mine.size(1), mine.size(2)}, x.options()));
    works.push_back(e.comm.all_gather(arrived.back(), mine));
  };
  send(0);
  for (int64_t piece = 0; piece < cuts.pieces; ++piece) {
    send(piece + 1);
    at::Tensor& in = arrived[static_cast<size_t>(piece)];
    works[static_cast<size_t>(piece)].wait();
    const layout::Part part = cuts[piece];
    piece_of(whole, cuts, part, n).copy_(in.transpose(0, 1));
    for (size_t i = 0; i < weights.size(); ++i) {
      if (cuts.dim == 0) {  // samples lie one after the other in the result
        multiply(rows_of(products[i].narrow(0, part.begin, part.size)), rows_of(whole.narrow(0, part.begin, part.size)), weights[i], biases[i]);
        continue;
      }
      at::Tensor y = at::empty({in.size(0), in.size(1), in.size(2), weights[i].size(0)}, x.options());
      multiply(rows_of(y), rows_of(in), weights[i], biases[i]);
      piece_of(products[i], cuts, part, n).copy_(y.transpose(0, 1));
    }
    in.reset();
  }
  return whole;
}

/// sum_i x_i weights_i, [B, T, in_i] and [in_i, D], of one piece of rows.
at::Tensor sum_of_products(const std::vector<at::Tensor>& x, const std::vector<at::Tensor>& weights, int64_t begin, int64_t size) {
  at::Tensor sum;
  for (size_t i = 0; i < x.size(); ++i) {
    const at::Tensor rows = x[i].narrow(0, begin, size);
    sum.defined() ? static_cast<void>(sum.addmm_(rows, weights[i])) : static_cast<void>(sum = at::mm(rows, weights[i]));
  }
  return sum;
}

/// Sum over the ranks of sum_i x[i] weights[i], [B, T, D] or this rank's part of T. Runs `meanwhile` when all pieces are on their way.
at::Tensor multiply_and_reduce(std::vector<at::Tensor> x, const std::vector<at::Tensor>& weights, const PieceExchange& e, const std::function<void()>& meanwhile) {
  const int64_t n = e.comm.size(), batch = x[0].size(0), tokens = x[0].size(1), width = weights[0].size(1);
  std::vector<at::Tensor> kept;
  std::vector<Work> works;
  if (!e.sequence) {
    for (at::Tensor& t : x) t = rows_of(t);
    const int64_t rows = batch * tokens, pieces = std::max<int64_t>(1, std::min(e.pieces, rows));
    at::Tensor out = at::empty({rows, width}, x[0].options());
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const layout::Part part = layout::part_of(rows, pieces, piece);
      const at::Tensor mine = out.narrow(0, part.begin, part.size);
      mine.copy_(sum_of_products(x, weights, part.begin, part.size));
      works.push_back(e.comm.all_reduce(mine));
    }
    meanwhile();
    for (Work& work : works) work.wait();
    return out.view({batch, tokens, width});
  }
  at::Tensor out = at::empty({batch, tokens / n, width}, x[0].options());
  const Cuts cuts(out, e.pieces);
  for (at::Tensor& t : x) t = t.contiguous();
  for (int64_t piece = 0; piece < cuts.pieces; ++piece) {
    const layout::Part part = cuts[piece];
    std::vector<at::Tensor> rows;
    std::vector<int64_t> sizes;
    for (const at::Tensor& t : x) {
      const at::Tensor by_rank = piece_of(t, cuts, part, n).transpose(0, 1);  // [ranks, piece of B, piece of T / ranks, in]
      sizes = {n, by_rank.size(1), by_rank.size(2), width};
      rows.push_back(rows_of(by_rank));
    }
    const at::Tensor sums = sum_of_products(rows, weights, 0, rows[0].size(0)).view(sizes);
    kept.push_back(at::empty({sizes[1], sizes[2], width}, x[0].options()));
    works.push_back(e.comm.reduce_scatter(kept.back(), sums));
  }
  meanwhile();
  for (int64_t piece = 0; piece < cuts.pieces; ++piece) {
    works[static_cast<size_t>(piece)].wait();
    out.narrow(cuts.dim, cuts[piece].begin, cuts[piece].size).copy_(kept[static_cast<size_t>(piece)]);
  }
  return out;
}

/// As at::linear under autocast.
at::Tensor as_operand(const at::Tensor& t) {
  if (!at::autocast::is_autocast_enabled(t.device().type())) return t;
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(t.device().type()), t, t.device().type());
}

void refuse_second_derivatives() {
  if (!at::GradMode::is_enabled()) return;
  throw ConfigError("gradients of gradients through products that overlap with tensor-parallel communication: leave the overlap out (one piece; parallel.tp_overlap = 1)");
}

void keep(AutogradContext* context, const Setting& setting) { context->saved_data["setting"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(setting)); }
const Setting& setting_of(AutogradContext* context) { return static_cast<const Holder&>(*context->saved_data["setting"].toCapsule()).setting; }

struct BehindEntry : torch::autograd::Function<BehindEntry> {
  // TensorLists, of defined tensors: libtorch takes a std::vector for something that has no gradient.
  static variable_list forward(AutogradContext* context, const at::Tensor& x, at::TensorList weights, at::TensorList given, const Setting& setting) {
    keep(context, setting);
    variable_list products, biases(weights.size());
    size_t next = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (setting.biased[i]) biases[i] = given[next++];
    }
    at::Tensor whole = x;
    if (setting.exchange.sequence) {
      whole = gather_and_multiply(x, weights.vec(), biases, setting.exchange, products);
    } else {
      for (size_t i = 0; i < weights.size(); ++i) products.push_back(at::linear(x, weights[i], biases[i]));
    }
    variable_list saved{std::any_of(weights.begin(), weights.end(), [](const at::Tensor& w) { return w.requires_grad(); }) ? whole : at::Tensor()};
    saved.insert(saved.end(), weights.begin(), weights.end());
    context->save_for_backward(std::move(saved));
    return products;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    refuse_second_derivatives();
    variable_list saved = context->get_saved_variables();
    const at::Tensor whole = saved.front();
    const std::vector<at::Tensor> weights(saved.begin() + 1, saved.end());
    const size_t count = weights.size();
    const Setting& setting = setting_of(context);
    const auto with_bias = static_cast<size_t>(std::count(setting.biased.begin(), setting.biased.end(), true));
    variable_list result(2 + count + with_bias);  // of x, weights, biases, and nothing
    const auto of_weights = [&] {
      size_t bias = 1 + count;
      for (size_t i = 0; i < count; ++i) {
        const at::Tensor rows = rows_of(gradients[i]);
        if (context->needs_input_grad(1 + i)) result[1 + i] = at::mm(rows.t(), rows_of(whole));
        if (!setting.biased[i]) continue;
        if (context->needs_input_grad(bias)) result[bias] = rows.sum(0);
        ++bias;
      }
    };
    if (!context->needs_input_grad(0)) {
      of_weights();
    } else {
      result[0] = multiply_and_reduce(gradients, weights, setting.exchange, of_weights);
    }
    return result;
  }
};

struct BeforeExit : torch::autograd::Function<BeforeExit> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, const Setting& setting) {
    keep(context, setting);
    context->save_for_backward({weight.requires_grad() ? x : at::Tensor(), weight});
    return multiply_and_reduce({x}, {weight.t()}, setting.exchange, [] {});
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    refuse_second_derivatives();
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const PieceExchange& exchange = setting_of(context).exchange;
    std::vector<at::Tensor> of_x(1);
    at::Tensor gradient = gradients[0];
    if (exchange.sequence) {
      gradient = gather_and_multiply(gradient, {weight.t()}, {at::Tensor()}, exchange, of_x);
    } else if (context->needs_input_grad(0)) {
      of_x[0] = at::matmul(gradient, weight);
    }
    return {of_x[0], context->needs_input_grad(1) ? at::mm(rows_of(gradient).t(), rows_of(x)) : at::Tensor(), at::Tensor()};
  }
};

}  // namespace

std::vector<at::Tensor> products_behind_entry(const at::Tensor& x, const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& biases,
                                              const PieceExchange& exchange) {
  std::vector<at::Tensor> w, b;
  std::vector<bool> biased;
  for (const at::Tensor& t : weights) w.push_back(as_operand(t));
  for (const at::Tensor& t : biases) {
    biased.push_back(t.defined());
    if (t.defined()) b.push_back(as_operand(t));
  }
  return BehindEntry::apply(as_operand(x), at::TensorList(w), at::TensorList(b), Setting{exchange, biased});
}

at::Tensor product_before_exit(const at::Tensor& x, const at::Tensor& weight, const PieceExchange& exchange) {
  return BeforeExit::apply(as_operand(x), as_operand(weight), Setting{exchange, {}});
}

}  // namespace weft::autograd
