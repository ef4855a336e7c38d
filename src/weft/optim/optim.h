// Optimizers that update a parameter in one pass, with fp32 master weights for bf16 and fp16 parameters.
#pragma once

#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "weft/optim/kernels.h"
#include "weft/parallel/data_parallel.h"

namespace weft::optim {

using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

/// fp32 copies of parameters stored in a 16-bit type; empty for fp32 and fp64 parameters. The parameter is always the
/// rounding of its master (an update below half a unit of bf16 is not lost).
class MasterWeights {
 public:
  /// The tensor to update: the fp32 master of `parameter` (made at the first call), or the parameter itself.
  at::Tensor of(const at::Tensor& parameter);
  void save(torch::serialize::OutputArchive& archive, const std::vector<OptimizerParamGroup>& groups) const;
  void load(torch::serialize::InputArchive& archive, const std::vector<OptimizerParamGroup>& groups);

 private:
  std::unordered_map<const void*, at::Tensor> masters_;
};

/// AdamW (Loshchilov and Hutter 2019, decoupled weight decay; torch::optim::AdamW's defaults and formulas). One pass over
/// parameter, gradient and moments. Moments are fp32 for 16-bit parameters. Parameters without gradient are skipped:
/// no decay, no moment update. amsgrad is refused (ConfigError).
class AdamW : public torch::optim::AdamW {
 public:
  explicit AdamW(const std::vector<OptimizerParamGroup>& groups, AdamWOptions defaults = {});
  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  /// Training in bf16 alone: the bf16 parameters named here get no fp32 master (4 bytes each); instead every update rounds
  /// them stochastically (Gupta et al. 2015), so that small updates survive in expectation. The random bits are a function of
  /// (seed, step, name, global element), whatever the layout: a parameter that is a shard says where it begins in the
  /// whole. Call before the first step. ConfigError for a tensor that is not bf16.
  void round_stochastically(uint64_t seed, const std::vector<NamedTensor>& parameters, const std::vector<int64_t>& begins = {});

 private:
  void update(at::Tensor& parameter, const AdamWOptions& options);

  MasterWeights masters_;
  std::unordered_map<const void*, Rounding> roundings_;  ///< by parameter
};

/// SGD with momentum, dampening, Nesterov and (coupled) weight decay, torch::optim::SGD's formulas.
class SGD : public torch::optim::SGD {
 public:
  explicit SGD(const std::vector<OptimizerParamGroup>& groups, SGDOptions defaults);
  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  MasterWeights masters_;
};

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
  enum class Kind { constant, linear, cosine } kind = Kind::constant;
  double peak = 1e-3;
  int64_t warmup = 0;      ///< updates of linear warm-up; update k (from 0) of them uses peak * (k + 1) / warmup
  int64_t total = 0;       ///< updates of the whole run, warm-up included
  double final_ratio = 0;  ///< rate at the end, as a share of the peak

  /// Rate of update number `update` (from 0). Beyond `total` the final rate.
  double at(int64_t update) const;
};

/// Sets the rate of every group.
void set_learning_rate(torch::optim::Optimizer& optimizer, double rate);

}  // namespace weft::optim
