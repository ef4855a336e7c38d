#include "weft/optim/lion.h"

#include <torch/optim/serialize.h>

#include "weft/optim/kernels.h"

namespace weft::optim {

void LionOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
}

void LionOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
}

Lion::Lion(const std::vector<OptimizerParamGroup>& groups, LionOptions defaults)
    : ElementwiseOptimizer(groups, std::make_unique<LionOptions>(defaults)) {
  keep_options(param_groups_, groups);
  for (const auto& group : param_groups_) {
    const auto& o = static_cast<const LionOptions&>(group.options());
    check_range("lr", o.lr(), 0);
    check_range("weight_decay", o.weight_decay(), 0);
    check_range("beta1", std::get<0>(o.betas()), 0, 1);
    check_range("beta2", std::get<1>(o.betas()), 0, 1);
  }
}

std::vector<StateSpec> Lion::own_states(const at::Tensor& parameter, const OptimizerOptions&) const {
  return {{.name = "exp_avg", .dtype = wide_dtype(parameter.scalar_type())}};
}

void Lion::update(const Stretch& s, const OptimizerOptions& options) const {
  const auto& o = static_cast<const LionOptions&>(options);
  const auto [beta1, beta2] = o.betas();
  lion_update({.lr = o.lr(), .beta1 = beta1, .beta2 = beta2, .weight_decay = o.weight_decay()}, s.weight, s.grad, s.states[0], s.copy);
}

void Lion::save(torch::serialize::OutputArchive& archive) const { torch::optim::serialize<NamedState, LionOptions>(archive, *this); }
void Lion::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<NamedState, LionOptions>(archive, *this);
  loaded();
}

}  // namespace weft::optim
