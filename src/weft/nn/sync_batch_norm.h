// Batch normalisation over the batch of all ranks.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <optional>

#include "weft/comm/comm.h"

namespace weft::nn {

struct SyncBatchNormOptions {
  double eps = 1e-5;
  std::optional<double> momentum = 0.1;  ///< of the running statistics; nullopt: their plain average over all batches
  bool affine = true;                    ///< weight and bias
  bool track_running_stats = true;
};

/// torch::nn::BatchNorm1d/2d/3d on the batch of all ranks: x [B, C, ...] is normalised per channel with mean and biased
/// variance over every rank's rows, each value counted once, so that uneven batches (0 rows included) give one rank's
/// numbers. Parameters and buffers have BatchNorm's names; running statistics are equal on all ranks. In eval mode the
/// running statistics are used and nothing is communicated; without them (track_running_stats = false) it works as in
/// training.
///
/// Statistics form in fp64. Gradient convention `total` (autograd/collectives.h): the loss of the job is the sum of the
/// ranks' losses, as DataParallel takes it. Double backward works. Collective, forward and backward: every rank calls it for
/// every batch, with 0 rows if it has none (join_without_batch() alone would leave the others waiting here).
/// Errors: ConfigError if dim 1 is not `features`, or when the ranks have one value per channel altogether.
class SyncBatchNormImpl : public torch::nn::Module {
 public:
  SyncBatchNormImpl(int64_t features, Comm comm, SyncBatchNormOptions options = {});
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;               ///< [C], ones at the start; undefined if not affine
  at::Tensor bias;                 ///< [C], zeros
  at::Tensor running_mean;         ///< [C], zeros; undefined if not tracked
  at::Tensor running_var;          ///< [C], ones; unbiased
  at::Tensor num_batches_tracked;  ///< int64 scalar

 private:
  void track(const at::Tensor& mean, const at::Tensor& variance, double count);

  int64_t features_;
  Comm comm_;
  SyncBatchNormOptions options_;
};
TORCH_MODULE(SyncBatchNorm);

/// A SyncBatchNorm in place of `norm` (a BatchNorm1d, 2d or 3d): same options, and its values in the same memory.
template <class BatchNorm>
SyncBatchNorm synchronised(const BatchNorm& norm, const Comm& comm) {
  SyncBatchNorm other(norm->options.num_features(), comm,
                      SyncBatchNormOptions{.eps = norm->options.eps(),
                                           .momentum = norm->options.momentum(),
                                           .affine = norm->options.affine(),
                                           .track_running_stats = norm->options.track_running_stats()});
  for (const auto& item : norm->named_parameters()) other->named_parameters()[item.key()].set_data(item.value());
  for (const auto& item : norm->named_buffers()) other->named_buffers()[item.key()].set_data(item.value());
  return other;
}

}  // namespace weft::nn
