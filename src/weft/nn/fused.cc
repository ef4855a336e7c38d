#include "weft/nn/fused.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "weft/core/error.h"
#include "weft/nn/simd.h"
#include "weft/nn/vocab_parallel.h"

namespace weft::nn::fused {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kElementGrain = int64_t{1} << 15;  ///< elements below which a second thread does not pay
/// Rows that share one partial weight gradient. Fixed, so that sums do not depend on the number of threads.
constexpr int64_t kRowsPerPart = 256;

template <class T>
struct Type {
  using type = T;
  using Computed = simd::Computed<T>;
  static const T* in(const at::Tensor& t) { return static_cast<const T*>(t.const_data_ptr()); }
  static T* out(const at::Tensor& t) { return static_cast<T*>(t.mutable_data_ptr()); }
  static const Computed* computed_in(const at::Tensor& t) { return static_cast<const Computed*>(t.const_data_ptr()); }
  static Computed* computed_out(const at::Tensor& t) { return static_cast<Computed*>(t.mutable_data_ptr()); }
};

/// Calls body with the Type of the tensor's elements. Not for meta tensors: they have no elements, and what a kernel allocates
/// is allocated around it.
template <class Body>
void dispatch(const at::Tensor& t, Body body) {
  if (t.is_meta()) return;
  switch (t.scalar_type()) {
    case at::kDouble: return body(Type<double>{});
    case at::kFloat: return body(Type<float>{});
    case at::kBFloat16: return body(Type<simd::Bf16Bits>{});
    default: throw InternalError("a fused kernel was given a tensor of another type than fp64, fp32 or bf16");
  }
}

at::TensorOptions computed_options(const at::Tensor& t) {
  return t.options().dtype(t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat).requires_grad(false);
}

/// Gradients come from raw memory and have no graph of their own.
void refuse_second_derivative() {
  if (at::GradMode::is_enabled())
    throw ConfigError("kernels = fused: a fused kernel has no second derivative (backward with create_graph); "
                      "use kernels = torch.");
}

class RmsNorm : public torch::autograd::Function<RmsNorm> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const at::Tensor& weight, double eps) {
    const at::Tensor x = input.contiguous(), w = weight.contiguous();
    const int64_t n = w.numel(), rows = x.numel() / n;
    at::Tensor y = at::empty_like(x), rstd = at::empty({rows}, computed_options(x));
    dispatch(x, [&](auto t) {
      at::parallel_for(0, rows, std::max<int64_t>(1, kElementGrain / n), [&](int64_t from, int64_t to) {
        simd::rms_norm_forward(t.in(x) + from * n, t.in(w), eps, t.out(y) + from * n, t.computed_out(rstd) + from, to - from, n);
      });
    });
    ctx->save_for_backward({x, w, rstd});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_second_derivative();
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &w = saved[1], &rstd = saved[2], dy = grads[0].contiguous();
    const int64_t n = w.numel(), rows = x.numel() / n, parts = (rows + kRowsPerPart - 1) / kRowsPerPart;
    at::Tensor dx = at::empty_like(x), dweight = at::zeros({parts, n}, computed_options(x));
    dispatch(x, [&](auto t) {
      at::parallel_for(0, parts, 1, [&](int64_t from_part, int64_t to_part) {
        for (int64_t part = from_part; part < to_part; ++part) {
          const int64_t first = part * kRowsPerPart, count = std::min(kRowsPerPart, rows - first);
          simd::rms_norm_backward(t.in(dy) + first * n, t.in(x) + first * n, t.in(w), t.computed_in(rstd) + first,
                                  t.out(dx) + first * n, t.computed_out(dweight) + part * n, count, n);
        }
      });
    });
    return {dx, (parts == 1 ? dweight[0] : dweight.sum(0)).to(w.scalar_type()), at::Tensor()};
  }
};

class Swiglu : public torch::autograd::Function<Swiglu> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate, const at::Tensor& up) {
    const at::Tensor g = gate.contiguous(), u = up.contiguous();
    at::Tensor y = at::empty_like(g);
    dispatch(g, [&](auto t) {
      at::parallel_for(0, g.numel(), kElementGrain, [&](int64_t from, int64_t to) {
        simd::swiglu_forward(t.in(g) + from, t.in(u) + from, t.out(y) + from, to - from);
      });
    });
    ctx->save_for_backward({g, u});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_second_derivative();
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &g = saved[0], &u = saved[1], dy = grads[0].contiguous();
    at::Tensor dg = at::empty_like(g), du = at::empty_like(u);
    dispatch(g, [&](auto t) {
      at::parallel_for(0, g.numel(), kElementGrain, [&](int64_t from, int64_t to) {
        simd::swiglu_backward(t.in(dy) + from, t.in(g) + from, t.in(u) + from, t.out(dg) + from, t.out(du) + from, to - from);
      });
    });
    return {dg, du};
  }
};

/// x [B, T, H, hd].
at::Tensor turn(const at::Tensor& input, const at::Tensor& cos, const at::Tensor& sin, int direction) {
  const at::Tensor x = input.contiguous();
  at::Tensor y = at::empty_like(x);
  const int64_t tokens = x.size(1), heads = x.size(2), head_dim = x.size(3), rotated = cos.size(1);
  dispatch(x, [&](auto t) {
    at::parallel_for(0, x.size(0) * tokens, std::max<int64_t>(1, kElementGrain / (heads * head_dim)), [&](int64_t from, int64_t to) {
      for (int64_t row = from; row < to; ++row) {
        const int64_t angle = row % tokens * rotated, at = row * heads * head_dim;
        simd::rope_token(t.in(x) + at, t.computed_in(cos) + angle, t.computed_in(sin) + angle, t.out(y) + at, heads, head_dim,
                         rotated, direction);
      }
    });
  });
  return y;
}

class Rope : public torch::autograd::Function<Rope> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos,
                               const at::Tensor& sin) {
    ctx->saved_data["cos"] = cos;
    ctx->saved_data["sin"] = sin;
    return {turn(q, cos, sin, 1), turn(k, cos, sin, 1)};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_second_derivative();
    const at::Tensor cos = ctx->saved_data["cos"].toTensor(), sin = ctx->saved_data["sin"].toTensor();
    const auto back = [&](const at::Tensor& grad) { return grad.defined() ? turn(grad, cos, sin, -1) : grad; };
    return {back(grads[0]), back(grads[1]), at::Tensor(), at::Tensor()};
  }
};

/// Losses of `logits` [rows, V] in fp64, summed in row order; with `gradient` the logits become their gradient.
double cross_entropy(const at::Tensor& logits, const int64_t* targets, int64_t ignore_index, bool gradient) {
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  std::vector<double> losses(static_cast<size_t>(rows), 0.0);
  dispatch(logits, [&](auto t) {
    using T = typename decltype(t)::type;
    at::parallel_for(0, rows, std::max<int64_t>(1, kElementGrain / vocab), [&](int64_t from, int64_t to) {
      std::vector<simd::Computed<T>> scratch(sizeof(T) == 2 ? static_cast<size_t>(vocab) : 0);
      for (int64_t row = from; row < to; ++row) {
        T* const values = t.out(logits) + row * vocab;
        if (targets[row] != ignore_index)
          losses[static_cast<size_t>(row)] = simd::cross_entropy_row(values, vocab, targets[row], gradient, scratch.data());
        else if (gradient)
          std::fill_n(values, vocab, T{0});
      }
    });
  });
  double total = 0;
  for (const double loss : losses) total += loss;
  return total;
}

/// The same for rows whose classes lie on several ranks, `logits` being this rank's. One gather of three numbers per row, in place
/// of the three reductions of Shoeybi et al. 2019 (largest, sum, target): one wait instead of three.
double cross_entropy_of_part(const at::Tensor& logits, const int64_t* targets, int64_t ignore_index, bool gradient, const VocabPart& part) {
  const int64_t rows = logits.size(0), classes = logits.size(1), ranks = part.tp.size();
  const at::TensorOptions options = logits.options().dtype(at::kDouble);
  const at::Tensor mine = at::empty({rows, 3}, options), all = at::empty({ranks, rows, 3}, options);
  const int64_t grain = std::max<int64_t>(1, kElementGrain / classes);
  const auto own_target = [&](int64_t row) {
    const int64_t place = targets[row] - part.rows.begin;
    return place >= 0 && place < classes ? place : -1;
  };
  dispatch(logits, [&](auto t) {
    at::parallel_for(0, rows, grain, [&](int64_t from, int64_t to) {
      auto* shares = mine.mutable_data_ptr<double>();
      for (int64_t row = from; row < to; ++row) {
        simd::RowShare share{};
        if (targets[row] != ignore_index) share = simd::softmax_begin(t.out(logits) + row * classes, classes, own_target(row), gradient);
        shares[3 * row] = share.largest;
        shares[3 * row + 1] = share.sum;
        shares[3 * row + 2] = share.at_target;
      }
    });
  });
  part.tp.comm().all_gather(all, mine).wait();
  double total = 0;
  dispatch(logits, [&](auto t) {
    std::vector<double> losses(static_cast<size_t>(rows), 0.0);
    at::parallel_for(0, rows, grain, [&](int64_t from, int64_t to) {
      const auto* shares = all.const_data_ptr<double>();
      for (int64_t row = from; row < to; ++row) {
        auto* const values = t.out(logits) + row * classes;
        if (targets[row] == ignore_index) {
          if (gradient) std::fill_n(values, classes, typename decltype(t)::type{0});
          continue;
        }
        double largest = -INFINITY, sum = 0, at_target = 0;
        for (int64_t rank = 0; rank < ranks; ++rank) largest = std::max(largest, shares[3 * (rank * rows + row)]);
        for (int64_t rank = 0; rank < ranks; ++rank) {
          const double* share = shares + 3 * (rank * rows + row);
          sum += share[1] * std::exp(share[0] - largest);
          at_target += share[2];
        }
        const double log_total = largest + std::log(sum);
        losses[static_cast<size_t>(row)] = log_total - at_target;
        const double own_largest = mine.const_data_ptr<double>()[3 * row];
        if (gradient) simd::softmax_end(values, classes, own_largest, log_total, own_target(row));
      }
    });
    for (const double loss : losses) total += loss;
  });
  return total;
}

/// Logits that exist at a time: at most this many bytes, but no fewer rows than the matrix products need to be fast (below
/// 512 rows they lose half their speed on CPUs).
constexpr int64_t kLogitsBytes = int64_t{256} << 20;
constexpr int64_t kFewestRows = 512;

class LinearCrossEntropy : public torch::autograd::Function<LinearCrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets,
                            int64_t ignore_index, const VocabPart* part_of_vocab, bool hidden_needed, bool weight_needed) {
    const at::Tensor h = hidden.contiguous(), y = targets.contiguous();
    const int64_t rows = h.size(0), vocab = weight.size(0);
    const int64_t ranks = part_of_vocab == nullptr ? 1 : part_of_vocab->tp.size();
    const int64_t widest = part_of_vocab == nullptr ? vocab : (part_of_vocab->vocab + ranks - 1) / ranks;  // the same on every rank
    const int64_t step = std::max(kFewestRows, kLogitsBytes / (widest * h.element_size()));
    // Several parts of a 16-bit weight gradient are summed in fp32.
    const bool wide_sum = weight_needed && rows > step && h.scalar_type() == at::kBFloat16;
    at::Tensor dhidden = hidden_needed ? at::empty_like(h) : at::Tensor();
    at::Tensor dweight = weight_needed ? at::empty(weight.sizes(), wide_sum ? computed_options(h) : h.options().requires_grad(false)) : at::Tensor();
    at::Tensor buffer = at::empty({std::min(rows, step), vocab}, h.options().requires_grad(false));
    double total = 0;
    for (int64_t first = 0; first < rows; first += step) {
      const int64_t count = std::min(step, rows - first);
      const at::Tensor part = h.narrow(0, first, count);
      at::Tensor logits = buffer.narrow(0, 0, count);
      at::mm_out(logits, part, weight.t());
      const int64_t* const ids = y.is_meta() ? nullptr : y.const_data_ptr<int64_t>() + first;
      const bool gradient = hidden_needed || weight_needed;
      total += part_of_vocab == nullptr ? cross_entropy(logits, ids, ignore_index, gradient)
                                        : cross_entropy_of_part(logits, ids, ignore_index, gradient, *part_of_vocab);
      if (hidden_needed) {
        at::Tensor out = dhidden.narrow(0, first, count);
        at::mm_out(out, logits, weight);
      }
      if (!weight_needed) continue;
      if (wide_sum) first == 0 ? dweight.copy_(at::mm(logits.t(), part)) : dweight.add_(at::mm(logits.t(), part));
      else if (first == 0) at::mm_out(dweight, logits.t(), part);
      else dweight.addmm_(logits.t(), part);
    }
    if (hidden_needed) ctx->saved_data["dhidden"] = dhidden;
    if (weight_needed) ctx->saved_data["dweight"] = dweight.to(weight.scalar_type());
    return at::full({}, total, computed_options(h));
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_second_derivative();
    const auto scaled = [&](const char* name, bool needed) {
      if (!needed) return at::Tensor();
      const auto found = ctx->saved_data.find(name);
      if (found == ctx->saved_data.end())
        throw ConfigError("kernels = fused: a second backward through the same loss; the first one used up its gradients. "
                          "Use kernels = torch for retain_graph.");
      at::Tensor gradient = found->second.toTensor();
      ctx->saved_data.erase(found);
      return gradient.mul_(grads[0]);
    };
    const at::Tensor dhidden = scaled("dhidden", ctx->needs_input_grad(0)), dweight = scaled("dweight", ctx->needs_input_grad(1));
    return {dhidden, dweight, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

bool serves(std::initializer_list<at::Tensor> tensors) {
  const at::ScalarType type = tensors.begin()->scalar_type();
  if (type != at::kDouble && type != at::kFloat && type != at::kBFloat16) return false;
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& t) { return (t.is_cpu() || t.is_meta()) && t.scalar_type() == type && t.numel() > 0; });
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) { return RmsNorm::apply(x, weight, eps); }

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) { return Swiglu::apply(gate, up); }

std::pair<at::Tensor, at::Tensor> rope(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos, const at::Tensor& sin) {
  const variable_list turned = Rope::apply(q, k, cos.contiguous(), sin.contiguous());
  return {turned[0], turned[1]};
}

at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets, int64_t ignore_index,
                                const VocabPart* part) {
  const bool recording = at::GradMode::is_enabled();
  return LinearCrossEntropy::apply(hidden, weight, targets, ignore_index, part, recording && hidden.requires_grad(),
                                   recording && weight.requires_grad());
}

}  // namespace weft::nn::fused
