// Lion: the sign of a moving average as the update, and one moment per parameter.
#pragma once

#include <torch/arg.h>

#include "weft/optim/elementwise.h"

namespace weft::optim {

struct LionOptions : torch::optim::OptimizerCloneableOptions<LionOptions> {
  LionOptions(double lr = 1e-4) : lr_(lr) {}  // NOLINT(google-explicit-constructor): as torch's options
  typedef std::tuple<double, double> betas_t;
  TORCH_ARG(double, lr);  ///< every weight moves by it in each update: 3 to 10 times less than AdamW's
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.99);
  TORCH_ARG(double, weight_decay) = 0;  ///< decoupled; 3 to 10 times AdamW's, so that lr * weight_decay stays

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(double value) override { lr(value); }
};

/// Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2; the published defaults): 4 bytes per parameter
/// less than AdamW. Groups keep the options that they come with. ConfigError for options out of range.
class Lion : public ElementwiseOptimizer {
 public:
  explicit Lion(const std::vector<OptimizerParamGroup>& groups, LionOptions defaults = {});
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  std::vector<StateSpec> own_states(const at::Tensor& parameter, const OptimizerOptions& options) const override;
  void update(const Stretch& stretch, const OptimizerOptions& options) const override;
};

}  // namespace weft::optim
