// AdamW and SGD in one pass over a parameter, parameter groups by name, and learning rates over a run.
#pragma once

#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "weft/optim/elementwise.h"
#include "weft/optim/kernels.h"
#include "weft/optim/tensor_parts.h"
#include "weft/parallel/data_parallel.h"

namespace weft::optim {

using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

/// AdamW (Loshchilov and Hutter 2019, decoupled weight decay; torch::optim::AdamW's defaults, formulas and archives). One pass over
/// parameter, gradient and moments. Moments are fp32 for 16-bit parameters. amsgrad is refused (ConfigError).
class AdamW : public ElementwiseOptimizer {
 public:
  explicit AdamW(const std::vector<OptimizerParamGroup>& groups, AdamWOptions defaults = {});
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  /// Training in bf16 alone: the bf16 parameters named here get no fp32 master (4 bytes each); instead every update rounds
  /// them stochastically (Gupta et al. 2015), so that small updates survive in expectation. The random bits are a function of
  /// (seed, step, name, global element), whatever the layout: where a tensor begins in the whole parameter is what shard_info()
  /// says, or `begins`. Call before the first step. ConfigError for a tensor that is not bf16.
  void round_stochastically(uint64_t seed, const std::vector<NamedTensor>& parameters, const std::vector<int64_t>& begins = {});

  /// Keeps both moments in bf16, rounded to nearest: 4 bytes per parameter less (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). Call
  /// before the first step. ConfigError for betas above 0.992: a moment's change in one step, 1 - beta of it, would be below what bf16
  /// can tell apart, and the moment would stop.
  void keep_moments_in_bf16();

  std::vector<StateSpec> own_states(const at::Tensor& parameter, const OptimizerOptions& options) const override;
  void update(const Stretch& stretch, const OptimizerOptions& options) const override;

 protected:
  bool keeps_master(const at::Tensor& parameter) const override;

 private:
  std::unordered_map<const void*, std::pair<Rounding, TensorPart>> roundings_;  ///< by parameter
  bool bf16_moments_ = false;
};

/// SGD with momentum, dampening, Nesterov and (coupled) weight decay, torch::optim::SGD's formulas.
class SGD : public ElementwiseOptimizer {
 public:
  explicit SGD(const std::vector<OptimizerParamGroup>& groups, SGDOptions defaults);
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  std::vector<StateSpec> own_states(const at::Tensor& parameter, const OptimizerOptions& options) const override;
  void update(const Stretch& stretch, const OptimizerOptions& options) const override;
};

/// The step of AdamW under `options`.
AdamWStep adamw_step(const AdamWOptions& options, int64_t step);

/// Two groups: matrices (two or more dims, by the logical shape) keep `options`' weight decay, the rest gets none. `updated`:
/// what the optimizer holds of each of `parameters` (DataParallel::shards()).
template <class Options>
std::vector<OptimizerParamGroup> decay_matrices_only(const std::vector<NamedTensor>& parameters,
                                                     const std::vector<NamedTensor>& updated, Options options) {
  std::vector<at::Tensor> matrices, others;
  for (size_t i = 0; i < parameters.size(); ++i) (parameters[i].tensor.dim() >= 2 ? matrices : others).push_back(updated[i].tensor);
  std::vector<OptimizerParamGroup> groups;
  if (!matrices.empty()) groups.emplace_back(matrices, std::make_unique<Options>(options));
  if (!others.empty()) groups.emplace_back(others, std::make_unique<Options>(Options(options).weight_decay(0)));
  return groups;
}
template <class Options>
std::vector<OptimizerParamGroup> decay_matrices_only(const std::vector<NamedTensor>& parameters, Options options) {
  return decay_matrices_only(parameters, parameters, std::move(options));
}
template <class Options>
std::vector<OptimizerParamGroup> decay_matrices_only(const DataParallel& dp, Options options) {
  return decay_matrices_only(dp.parameters(), dp.shards(), std::move(options));
}

/// dp.shards() in one group per rule, by the first rule whose patterns (core/pattern.h) match the parameter's name: {{"*.norm.*|*.bias",
/// no_decay}, {"*", decay}}. Rules without parameters give no group. ConfigError for a parameter that no rule matches.
std::vector<at::Tensor> matching(const DataParallel& dp, const std::vector<std::string>& rules, size_t rule);
template <class Options>
std::vector<OptimizerParamGroup> param_groups(const DataParallel& dp, const std::vector<std::pair<std::string, Options>>& rules) {
  std::vector<std::string> patterns;
  for (const auto& rule : rules) patterns.push_back(rule.first);
  std::vector<OptimizerParamGroup> groups;
  for (size_t i = 0; i < rules.size(); ++i) {
    std::vector<at::Tensor> members = matching(dp, patterns, i);
    if (!members.empty()) groups.emplace_back(std::move(members), std::make_unique<Options>(rules[i].second));
  }
  return groups;
}

/// Learning rate as a function of completed optimizer updates alone.
struct LearningRate {
  /// After the warm-up: constant; falling linearly, or as half a cosine, to the end; wsd (warm-up, stable, decay: Hu et al. 2024,
  /// "MiniCPM", section 4): constant and then falling linearly over the last `decay` updates; inverse_sqrt (Vaswani et al. 2017): as
  /// 1 / sqrt(updates), not below the final rate.
  enum class Kind { constant, linear, cosine, wsd, inverse_sqrt } kind = Kind::constant;
  double peak = 1e-3;
  int64_t warmup = 0;      ///< updates of linear warm-up; update k (from 0) of them uses peak * (k + 1) / warmup
  int64_t total = 0;       ///< updates of the whole run, warm-up included
  int64_t decay = 0;       ///< wsd: updates of the decay at its end
  double final_ratio = 0;  ///< rate at the end, as a share of the peak

  /// Rate of update number `update` (from 0). Beyond `total` the final rate.
  double at(int64_t update) const;
};

/// Sets the rate of every group: `rate`, times the group's factor where there are factors, one per group.
void set_learning_rate(torch::optim::Optimizer& optimizer, double rate, const std::vector<double>& factors = {});

}  // namespace weft::optim
