// Dynamic loss scaling for fp16 gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "weft/parallel/data_parallel.h"

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}

namespace weft::optim {

/// The defaults are those of PyTorch's GradScaler.
struct LossScalerOptions {
  double initial = 65536;
  double growth = 2;               ///< factor after growth_interval steps without overflow
  double backoff = 0.5;            ///< factor after an overflow
  int64_t growth_interval = 2000;
  double smallest = 1;             ///< an overflow at this scale or below is an error: smaller scales do not help
};

/// Multiplies the loss, so that small gradients do not vanish in fp16, and divides the gradients again (Micikevicius et al.
/// 2018). A step whose gradients overflowed on any rank is skipped by all ranks:
///
///   scaler.scale(loss).backward();
///   if (scaler.unscale(dp)) {        // false: no update, and the learning-rate schedule stays where it is
///     dp.clip_grad_norm(1.0);
///     optimizer.step();
///   }
///   optimizer.zero_grad();
///
/// The scale is the same on all ranks at any time.
class LossScaler {
 public:
  explicit LossScaler(LossScalerOptions options = {});

  /// loss * scale, in fp32 or fp64.
  at::Tensor scale(const at::Tensor& loss) const;
  /// Collective over dp.comm(). True: all gradients are finite and divided by the scale. False: some are not; they are
  /// dropped on all ranks. Adapts the scale of the next step. ConfigError on all ranks when gradients overflow at the smallest scale.
  bool unscale(DataParallel& dp);

  double scale() const { return scale_; }
  int64_t skipped() const { return skipped_; }  ///< steps so far

  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  LossScalerOptions options_;
  double scale_;
  int64_t clean_ = 0;  ///< steps without overflow since the scale changed
  int64_t skipped_ = 0;
};

}  // namespace weft::optim
