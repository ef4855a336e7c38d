#include "weft/nn/placement.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

namespace weft::nn {
namespace {

class PartValues final : public StartValues {
 public:
  PartValues(std::shared_ptr<const StartValues> whole, int64_t row, int64_t first, int64_t row_part, std::string text)
      : whole_(std::move(whole)), row_(row), first_(first), row_part_(row_part), text_(std::move(text)) {}

  /// Element i of the part lies in stretch i / row_part_, and stretches lie row_ apart in the whole.
  void write(int64_t begin, at::Tensor part) const override {
    for (int64_t done = 0; done < part.numel();) {
      const int64_t at = begin + done, stretch = at / row_part_, within = at % row_part_;
      const int64_t count = std::min(part.numel() - done, row_part_ - within);
      whole_->write(stretch * row_ + first_ + within, part.narrow(0, done, count));
      done += count;
    }
  }
  std::string describe() const override { return whole_->describe() + text_; }

 private:
  std::shared_ptr<const StartValues> whole_;
  int64_t row_, first_, row_part_;
  std::string text_;
};

/// A gradient hook that changes nothing: hooks belong to the variable, whatever tensor stands behind it.
struct Carrier {
  std::shared_ptr<const TensorPlacement> placement;
  at::TensorBase operator()(const at::TensorBase& /*gradient*/) const { return {}; }  // undefined: unchanged
};

using Hook = std::function<at::TensorBase(const at::TensorBase&)>;

Hook* find_carrier(const at::Tensor& parameter) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(parameter);
  if (meta == nullptr || !meta->cpp_hooks_list_) return nullptr;
  for (Hook& hook : *meta->cpp_hooks_list_) {
    if (hook.target<Carrier>() != nullptr) return &hook;
  }
  return nullptr;
}

}  // namespace

void set_placement(const at::Tensor& parameter, TensorPlacement placement) {
  Carrier carrier{std::make_shared<const TensorPlacement>(std::move(placement))};
  if (Hook* known = find_carrier(parameter)) return void(*known = std::move(carrier));
  // Frozen parameters take no hooks, and keep those that they have.
  const bool frozen = !parameter.requires_grad();
  if (frozen) parameter.set_requires_grad(true);
  static_cast<const at::TensorBase&>(parameter).register_hook(std::move(carrier));  // of the base, which stores it as it is
  if (frozen) parameter.set_requires_grad(false);
}

std::shared_ptr<const TensorPlacement> placement_of(const at::Tensor& parameter) {
  const Hook* carrier = find_carrier(parameter);
  return carrier == nullptr ? nullptr : carrier->target<Carrier>()->placement;
}

namespace {

/// Each rank's tensor with dim `placement.dim` first, in rank order.
std::vector<at::Tensor> parts_of(const at::Tensor& local, const TensorPlacement& placement) {
  const Comm& comm = placement.comm;
  const at::Tensor rows = local.detach().movedim(std::max(placement.dim, 0), 0).contiguous();  // [n, ...]
  const at::Tensor counts = at::empty({comm.size()}, at::kLong);
  comm.all_gather(counts, at::full({1}, rows.size(0), at::kLong)).released();
  const auto* count = counts.const_data_ptr<int64_t>();
  std::vector<int64_t> shape = rows.sizes().vec();
  shape[0] = *std::max_element(count, count + comm.size());
  const at::Tensor padded = at::zeros(shape, rows.options());
  padded.narrow(0, 0, rows.size(0)).copy_(rows);
  shape.insert(shape.begin(), comm.size());
  const at::Tensor all = at::empty(shape, rows.options());
  comm.all_gather(all, padded).released();
  std::vector<at::Tensor> parts;
  for (int64_t rank = 0; rank < comm.size(); ++rank) parts.push_back(all[rank].narrow(0, 0, count[rank]));
  return parts;
}

}  // namespace

at::Tensor whole_tensor(const at::Tensor& local, const std::shared_ptr<const TensorPlacement>& placement) {
  const at::NoGradGuard no_grad;
  if (!placement || placement->dim < 0 || placement->comm.size() == 1) return local.detach().clone();
  if (local.is_meta()) {  // a rehearsal: others' sizes are not known
    const int64_t size = placement->comm.size();
    placement->comm.all_gather(at::empty({size * local.numel()}, local.options()), local.contiguous()).released();
    return at::empty(placement->shape, local.options());
  }
  std::vector<at::Tensor> parts = parts_of(local, *placement), held;
  for (size_t rank = 0; rank < parts.size(); rank += static_cast<size_t>(placement->copies)) held.push_back(parts[rank]);
  return at::cat(held).movedim(0, placement->dim).contiguous();
}

double copy_difference(const at::Tensor& local, const std::shared_ptr<const TensorPlacement>& placement) {
  const at::NoGradGuard no_grad;
  if (!placement || placement->copies == 1) return 0;
  const std::vector<at::Tensor> parts = parts_of(local.dim() == 0 ? local.view({1}) : local, *placement);
  double worst = 0;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    const at::Tensor& first = parts[rank - rank % static_cast<size_t>(placement->copies)];
    if (first.numel() == 0 || at::equal(parts[rank], first)) continue;
    const double off = (parts[rank] - first).abs().max().item<double>() / first.abs().max().item<double>();
    worst = std::isfinite(off) ? std::max(worst, off) : std::numeric_limits<double>::infinity();
  }
  return worst;
}

std::shared_ptr<const StartValues> values_of_part(std::shared_ptr<const StartValues> whole, std::vector<int64_t> shape, int dim,
                                                  int64_t begin, int64_t size) {
  int64_t inner = 1;
  for (size_t d = static_cast<size_t>(dim) + 1; d < shape.size(); ++d) inner *= shape[d];
  return std::make_shared<PartValues>(std::move(whole), shape[static_cast<size_t>(dim)] * inner, begin * inner, size * inner,
                                      fmt::format(", {} to {} of dim {}", begin, begin + size - 1, dim));
}

}  // namespace weft::nn
