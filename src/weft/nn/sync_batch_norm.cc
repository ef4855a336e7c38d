#include "weft/nn/sync_batch_norm.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "weft/autograd/collectives.h"
#include "weft/core/error.h"

namespace weft::nn {
namespace {

/// All dims but the channels'.
std::vector<int64_t> other_dims(const at::Tensor& x) {
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (d != 1) dims.push_back(d);
  }
  return dims;
}

/// [C] -> [1, C, 1, ...] to go with x.
at::Tensor per_channel(const at::Tensor& v, const at::Tensor& x) {
  std::vector<int64_t> shape(static_cast<size_t>(x.dim()), 1);
  shape[1] = v.numel();
  return v.view(shape);
}

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(int64_t features, Comm comm, SyncBatchNormOptions options)
    : features_(features), comm_(std::move(comm)), options_(options) {
  if (features < 1) throw ConfigError(fmt::format("SyncBatchNorm for {} channels; it needs at least one", features));
  if (options_.affine) {
    weight = register_parameter("weight", at::ones({features}));
    bias = register_parameter("bias", at::zeros({features}));
  }
  if (options_.track_running_stats) {
    running_mean = register_buffer("running_mean", at::zeros({features}));
    running_var = register_buffer("running_var", at::ones({features}));
    num_batches_tracked = register_buffer("num_batches_tracked", at::zeros({}, at::kLong));
  }
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& x) {
  if (x.dim() < 2 || x.size(1) != features_) {
    throw ConfigError(fmt::format("SyncBatchNorm for {} channels got a tensor of shape [{}]; it takes [B, {}, ...]", features_,
                                  fmt::join(x.sizes(), ", "), features_));
  }
  if (!is_training() && options_.track_running_stats) {
    return at::batch_norm(x, weight, bias, running_mean, running_var, /*training=*/false, 0.0, options_.eps, false);
  }
  const std::vector<int64_t> dims = other_dims(x);
  const at::Tensor mine = at::full({1}, static_cast<double>(x.numel() / features_), x.options().dtype(at::kDouble));
  const at::Tensor sums = autograd::all_reduce(at::cat({x.sum(dims, false, at::kDouble), mine}), comm_);  // [C + 1]
  const auto count = sums[features_].item<double>();  // values per channel over all ranks
  if (count == 1) {
    throw ConfigError("SyncBatchNorm: all ranks together have one value per channel, which has no variance; use a larger batch, "
                      "or eval()");
  }
  if (count == 0) return x.clone();  // nobody has a row
  const bool low = x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16;
  const auto dtype = low ? at::kFloat : x.scalar_type();
  const at::Tensor mean = sums.narrow(0, 0, features_) / count;
  const at::Tensor centred = x.to(dtype) - per_channel(mean.to(dtype), x);
  const at::Tensor variance = autograd::all_reduce(centred.square().sum(dims, false, at::kDouble), comm_) / count;
  if (is_training() && options_.track_running_stats) track(mean, variance, count);
  at::Tensor y = centred * per_channel((variance + options_.eps).rsqrt().to(dtype), x);
  if (options_.affine) y = y * per_channel(weight, x) + per_channel(bias, x);
  return y.to(x.scalar_type());
}

void SyncBatchNormImpl::track(const at::Tensor& mean, const at::Tensor& variance, double count) {
  const at::NoGradGuard no_grad;
  num_batches_tracked.add_(1);
  const double share = options_.momentum.value_or(1.0 / num_batches_tracked.item<double>());
  running_mean.mul_(1 - share).add_(mean.to(running_mean.scalar_type()), share);
  running_var.mul_(1 - share).add_((variance * (count / (count - 1))).to(running_var.scalar_type()), share);
}

}  // namespace weft::nn
