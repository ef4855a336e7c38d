#include <ATen/ATen.h>

#include "weft/core/error.h"
#include "weft/parallel/data_parallel.h"
#include "weft/parallel/gradient_hook.h"

namespace weft {
namespace {

/// `loss`, whose backward tells the engine of `dp` that it begins.
at::Tensor watched(const at::Tensor& loss, const DataParallel& dp) {
  if (!loss.requires_grad() || dp.parameters().empty()) return loss;
  const auto begins = parallel::backward_begin_of(dp.parameters().front().tensor);
  if (begins) loss.register_hook([begins](const at::Tensor&) { begins(); });
  return loss;
}

}  // namespace

int64_t global_count(int64_t count, const Comm& comm) {
  if (comm.size() == 1) return count;
  at::Tensor total = at::full({1}, count, at::kLong);
  comm.all_reduce(total, ReduceOp::sum).wait();
  return total.item<int64_t>();
}

at::Tensor scale_loss(const at::Tensor& loss_sum, int64_t global_valid_count, const DataParallel& dp) {
  if (global_valid_count < 0) {
    throw ConfigError("global valid count is " + std::to_string(global_valid_count) + "; it must not be negative");
  }
  if (global_valid_count == 0) return watched(loss_sum * 0, dp);
  const double ranks = dp.options().grad_scale == GradScale::mean_over_ranks ? dp.comm().size() : 1;
  return watched(loss_sum * (ranks / static_cast<double>(global_valid_count)), dp);
}

at::Tensor global_mean(const at::Tensor& loss_sum, int64_t valid_count, const DataParallel& dp) {
  dp.settle();
  return scale_loss(loss_sum, global_count(valid_count, dp.comm()), dp);
}

}  // namespace weft
