// Adafactor: second moments of a matrix as one number per row and one per column.
#pragma once

#include <torch/arg.h>

#include "weft/comm/comm.h"
#include "weft/optim/elementwise.h"

namespace weft::optim {

struct AdafactorOptions : torch::optim::OptimizerCloneableOptions<AdafactorOptions> {
  AdafactorOptions(double lr = 1e-2) : lr_(lr) {}  // NOLINT(google-explicit-constructor): as torch's options
  typedef std::tuple<double, double> eps_t;
  TORCH_ARG(double, lr);
  /// true: the rate of a parameter is lr * max(eps 2, its root mean square), lr being the relative step size of the paper, which a
  /// schedule of inverse square roots gives. false: lr itself.
  TORCH_ARG(bool, scale_parameter) = true;
  TORCH_ARG(double, beta1) = 0;             ///< above 0: a first moment, in 4 bytes per parameter
  TORCH_ARG(double, decay_power) = 0.8;     ///< the second moments' decay in update t is 1 - t^-decay_power
  TORCH_ARG(double, clip_threshold) = 1;    ///< largest root mean square of an update before the rate
  TORCH_ARG(eps_t, eps) = std::make_tuple(1e-30, 1e-3);  ///< added to squared gradients; least root mean square of a parameter
  TORCH_ARG(double, weight_decay) = 0;      ///< decoupled

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(double value) override { lr(value); }
};

/// Adafactor (Shazeer and Stern 2018, algorithms 4 to 6). Of a matrix [r, c] the state is r + c numbers on every rank, whatever the
/// sharding; parameters of more dims count as [product of the others, last]; those of one keep a second moment per element.
///
/// Shards may be cut anywhere: sums over rows, columns and whole parameters form in fp64, on each rank over its elements and then over
/// the ranks (two all_reduces per step, of all parameters together; over tensor-parallel ranks, too, where copies count once), so that numbers do not depend on the cuts but for rounding in
/// fp64. Groups keep the options that they come with. ConfigError for options out of range.
class Adafactor : public torch::optim::Optimizer {
 public:
  explicit Adafactor(const std::vector<OptimizerParamGroup>& groups, AdafactorOptions defaults = {});
  /// Collective over the ranks of the shards, and over tensor-parallel ones.
  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct Member;
  Member open(const at::Tensor& parameter, const AdafactorOptions& options);
  static void update(std::vector<Member>& members, const Comm& ranks, const Comm& tp);
};

}  // namespace weft::optim
