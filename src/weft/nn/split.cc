#include "weft/nn/split.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "weft/autograd/collectives.h"
#include "weft/core/error.h"
#include "weft/core/units.h"
#include "weft/layout/part.h"
#include "weft/nn/placement.h"
#include "weft/nn/start_values.h"
#include "weft/nn/vocab_parallel.h"

namespace weft::nn {
namespace {

/// Leaves of `parameter` this rank's part of dim `dim`. With memory the values are tp rank 0's.
void keep_part(at::Tensor& parameter, int dim, const layout::Part& part, const TensorAxis& tp, const std::string& name) {
  if (placement_of(parameter)) {
    throw ConfigError(fmt::format("the weight of module '{}' belongs to another layer that parallelize() cuts, too. Tied layers cannot be cut; leave both whole",
                                  name));
  }
  const at::NoGradGuard no_grad;
  const std::vector<int64_t> shape = parameter.sizes().vec();
  const auto values = start_values(parameter);
  if (!parameter.is_meta()) {
    at::Tensor whole = parameter.detach().contiguous();
    tp.comm().broadcast(whole, 0).released();
    parameter.set_data(whole.narrow(dim, part.begin, part.size).clone());
  } else {
    std::vector<int64_t> sizes = shape;
    sizes[static_cast<size_t>(dim)] = part.size;
    parameter.set_data(at::empty(sizes, parameter.options().requires_grad(false)));
    if (values) set_start_values(parameter, values_of_part(values, shape, dim, part.begin, part.size));
  }
  set_placement(parameter, {.comm = tp.comm(), .shape = shape, .dim = dim, .begin = part.begin});
}

void check_once(bool cut, const std::string& name) {
  if (cut) throw ConfigError(fmt::format("module '{}' is cut already; one pattern of parallelize() names it", name));
}

layout::Part even_part(int64_t count, const char* what, const TensorAxis& tp, const std::string& name) {
  if (count % tp.size() != 0) {
    std::string legal;
    for (const int64_t n : divisors(count)) legal += fmt::format("{}{}", legal.empty() ? "" : ", ", n);
    throw ConfigError(fmt::format("module '{}' has {} {}, which {} ranks cannot share out evenly; legal numbers of ranks: {}", name, count, what,
                                  tp.size(), legal));
  }
  return layout::part_of(count, tp.size(), tp.rank());
}

/// As UnitImpl::clone: what Base::clone makes is a Base.
template <class Base, class Self>
std::shared_ptr<torch::nn::Module> cloned(const Self& self, const std::optional<at::Device>& device) {
  auto copy = std::make_shared<Self>(self);
  static_cast<Base&>(*copy) = static_cast<const Base&>(*std::dynamic_pointer_cast<Base>(self.Base::clone(device)));
  const auto own = self.named_parameters(), theirs = copy->named_parameters();
  for (const auto& p : own) {
    if (const auto placement = placement_of(p.value())) set_placement(theirs[p.key()], *placement);
  }
  return copy;
}

}  // namespace

std::shared_ptr<torch::nn::Module> SplitLinearImpl::clone(const std::optional<at::Device>& device) const {
  return cloned<torch::nn::LinearImpl>(*this, device);
}

std::shared_ptr<torch::nn::Module> SplitEmbeddingImpl::clone(const std::optional<at::Device>& device) const {
  return cloned<torch::nn::EmbeddingImpl>(*this, device);
}

at::Tensor SplitLinearImpl::forward(const at::Tensor& input) {
  if (!style_) return linear(input, weight, bias);
  if (*style_ == TensorStyle::column)
    return tp_.overlaps() ? tp_.enter_products(input, {weight}, {bias})[0] : linear(tp_.enter(input), weight, bias);
  const at::Tensor y = tp_.overlaps() ? tp_.product_leave(input, weight) : tp_.leave(linear(input, weight, {}));
  if (!bias.defined()) return y;
  return y + autograd::copy_to(bias, tp_.sequence_comm());
}

void SplitLinearImpl::cut(TensorStyle style, const TensorAxis& tp, const std::string& name) {
  check_once(is_cut(), name);
  if (style == TensorStyle::sequence) throw InternalError("the style 'sequence' cuts no weights");
  const bool column = style == TensorStyle::column;
  const layout::Part part = column ? even_part(weight.size(0), "outputs", tp, name) : even_part(weight.size(1), "inputs", tp, name);
  keep_part(weight, column ? 0 : 1, part, tp, name);
  if (column && bias.defined()) keep_part(bias, 0, part, tp, name);
  style_ = style;
  tp_ = tp;
}

at::Tensor SplitEmbeddingImpl::forward(const at::Tensor& tokens) {
  if (!style_) return torch::nn::EmbeddingImpl::forward(tokens);
  return look_up_part(weight, tokens, {.begin = first_, .size = weight.size(0)}, rows_, tp_);
}

void SplitEmbeddingImpl::cut(TensorStyle style, const TensorAxis& tp, const std::string& name) {
  check_once(is_cut(), name);
  if (style != TensorStyle::row) throw ConfigError(fmt::format("embedding '{}': ranks share out its rows (style row), not its columns", name));
  if (options.max_norm() || options.padding_idx() || options.scale_grad_by_freq() || options.sparse()) {
    throw ConfigError(fmt::format("embedding '{}' has max_norm, padding_idx, scale_grad_by_freq or sparse, which look at rows that other ranks hold. "
                                  "Leave them out, or leave the embedding whole", name));
  }
  rows_ = weight.size(0);
  if (rows_ < tp.size()) throw ConfigError(fmt::format("embedding '{}' has {} rows for {} ranks; use fewer", name, rows_, tp.size()));
  const layout::Part part = layout::part_of(rows_, tp.size(), tp.rank());
  first_ = part.begin;
  keep_part(weight, 0, part, tp, name);
  style_ = style;
  tp_ = tp;
}

}  // namespace weft::nn
