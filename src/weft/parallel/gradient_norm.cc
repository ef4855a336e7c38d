#include "weft/parallel/gradient_norm.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>
#include <optional>

#include "weft/core/error.h"
#include "weft/parallel/flat_view.h"

namespace weft::parallel {
namespace {

/// torch.nn.utils.clip_grad_norm_'s.
constexpr double kClipEpsilon = 1e-6;

/// 16-bit results would be rounded to 8 or 11 bits, and in fp16 norms above 65504 would be infinite.
std::optional<at::ScalarType> result_dtype(const at::Tensor& grad) {
  return c10::isReducedFloatingType(grad.scalar_type()) ? std::optional(at::kFloat) : std::nullopt;
}

}  // namespace

double gradient_norm(const std::vector<NamedTensor>& tensors, const std::vector<bool>& counted, double norm_type,
                     const std::vector<Comm>& splits) {
  if (!(norm_type > 0)) throw ConfigError("norm type is " + std::to_string(norm_type) + "; it must be above 0, or infinity");
  const at::NoGradGuard no_grad;
  const bool infinite = std::isinf(norm_type);
  double total = 0;
  bool nan = false;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& grad = tensors[i].tensor.grad();
    if (!counted[i] || !grad.defined() || grad.numel() == 0) continue;
    const double norm = number_of(at::linalg_vector_norm(grad, norm_type, std::nullopt, /*keepdim=*/false, result_dtype(grad)));
    nan = nan || std::isnan(norm);
    total = infinite ? std::max(total, norm) : total + std::pow(norm, norm_type);
  }
  for (const Comm& split : splits) {
    if (split.size() == 1) continue;
    // A maximum does not carry NaN on every back end, and all ranks must return the same number.
    const at::Tensor sums = at::tensor({infinite ? 0.0 : total, nan ? 1.0 : 0.0}, at::kDouble);
    split.all_reduce(sums, ReduceOp::sum).wait();
    nan = sums[1].item<double>() > 0;
    if (infinite) {
      const at::Tensor largest = at::tensor({nan ? 0.0 : total}, at::kDouble);
      split.all_reduce(largest, ReduceOp::max).wait();
      total = largest.item<double>();
    } else {
      total = sums[0].item<double>();
    }
  }
  if (nan) return std::numeric_limits<double>::quiet_NaN();
  return infinite ? total : std::pow(total, 1.0 / norm_type);
}

void clip_gradients(const std::vector<NamedTensor>& tensors, double max_norm, double norm) {
  if (!(max_norm >= 0)) throw ConfigError("the largest norm is " + std::to_string(max_norm) + "; it must not be negative");
  const double factor = max_norm / (norm + kClipEpsilon);
  if (!(factor < 1.0)) return;
  const at::NoGradGuard no_grad;
  for (const NamedTensor& t : tensors) {
    if (t.tensor.grad().defined()) t.tensor.mutable_grad().mul_(factor);
  }
}

}  // namespace weft::parallel
