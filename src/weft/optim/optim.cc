#include "weft/optim/optim.h"

#include <torch/optim/serialize.h>

#include "weft/core/error.h"
#include "weft/core/philox.h"
#include "weft/parallel/shard_owner.h"

namespace weft::optim {

AdamW::AdamW(const std::vector<OptimizerParamGroup>& groups, AdamWOptions defaults)
    : ElementwiseOptimizer(groups, std::make_unique<AdamWOptions>(defaults)) {
  for (const auto& group : param_groups_) {
    if (static_cast<const AdamWOptions&>(group.options()).amsgrad()) {
      throw ConfigError("amsgrad is on, which weft::optim::AdamW does not keep. Use torch::optim::AdamW");
    }
  }
}

AdamWStep adamw_step(const AdamWOptions& options, int64_t step) {
  const auto [beta1, beta2] = options.betas();
  return {.lr = options.lr(), .beta1 = beta1, .beta2 = beta2, .eps = options.eps(), .weight_decay = options.weight_decay(), .step = step};
}

std::vector<StateSpec> AdamW::own_states(const at::Tensor& parameter, const OptimizerOptions&) const {
  const at::ScalarType dtype = bf16_moments_ ? at::kBFloat16 : wide_dtype(parameter.scalar_type());
  return {{.name = "exp_avg", .dtype = dtype}, {.name = "exp_avg_sq", .dtype = dtype}};
}

bool AdamW::keeps_master(const at::Tensor& parameter) const {
  return ElementwiseOptimizer::keeps_master(parameter) && !roundings_.contains(parameter.unsafeGetTensorImpl());
}

void AdamW::update(const Stretch& s, const OptimizerOptions& options) const {
  const AdamWStep step = adamw_step(static_cast<const AdamWOptions&>(options), s.step);
  const auto rounding = roundings_.find(s.parameter);
  if (rounding == roundings_.end()) return adamw_update(step, s.weight, s.grad, s.states[0], s.states[1], s.copy);
  const auto& [from, part] = rounding->second;
  if (!part.cut() || part.part_columns == part.columns) {
    Rounding from_here = from;
    from_here.first += s.begin + (part.cut() ? part.row * part.columns : 0);
    return adamw_update_rounded(step, s.weight, s.grad, s.states[0], s.states[1], from_here);
  }
  // Rows of a part lie apart in the whole parameter.
  part.for_rows(s.begin, s.weight.numel(), [&](int64_t row, int64_t column, int64_t at, int64_t n) {
    const auto of = [&](const at::Tensor& t) { return t.narrow(0, at, n); };
    Rounding of_row = from;
    of_row.first = row * part.columns + column;
    adamw_update_rounded(step, of(s.weight), of(s.grad), of(s.states[0]), of(s.states[1]), of_row);
  });
}

void AdamW::round_stochastically(uint64_t seed, const std::vector<NamedTensor>& parameters, const std::vector<int64_t>& begins) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const NamedTensor& p = parameters[i];
    if (p.tensor.scalar_type() != at::kBFloat16) {
      throw ConfigError("parameter '" + p.name + "' is " + c10::toString(p.tensor.scalar_type()) +
                        "; stochastic rounding is for bf16. Leave it out");
    }
    const ShardInfo* shard = shard_info(p.tensor);
    const int64_t begin = i < begins.size() ? begins[i] : shard != nullptr ? shard->begin() : 0;
    TensorPart part = tensor_part(p.tensor);
    part.begin = begin;
    roundings_[p.tensor.unsafeGetTensorImpl()] = {Rounding{.seed = seed, .stream = philox::stream_of("round/" + p.name), .first = begin}, part};
  }
}

void AdamW::keep_moments_in_bf16() {
  constexpr double kMost = 0.992;  // 1 - 2^-7: half of bf16's spacing is up to 2^-8 of a number
  for (const auto& group : param_groups_) {
    const auto [beta1, beta2] = static_cast<const AdamWOptions&>(group.options()).betas();
    for (const double beta : {beta1, beta2}) {
      if (beta <= kMost) continue;
      throw ConfigError("bf16 moments with a beta of " + std::to_string(beta) + ": a moment that moves by " + std::to_string(1 - beta) +
                        " of itself per step is rounded back to where it was. Use betas up to 0.992 (0.95 and 0.99 are usual), or fp32 moments");
    }
  }
  bf16_moments_ = true;
}

void AdamW::save(torch::serialize::OutputArchive& archive) const { torch::optim::serialize<NamedState, AdamWOptions>(archive, *this); }
void AdamW::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<NamedState, AdamWOptions>(archive, *this);
  loaded();
}

SGD::SGD(const std::vector<OptimizerParamGroup>& groups, SGDOptions defaults)
    : ElementwiseOptimizer(groups, std::make_unique<SGDOptions>(defaults)) {}

std::vector<StateSpec> SGD::own_states(const at::Tensor& parameter, const OptimizerOptions& options) const {
  if (static_cast<const SGDOptions&>(options).momentum() == 0) return {};
  return {{.name = "momentum_buffer", .dtype = wide_dtype(parameter.scalar_type())}};
}

void SGD::update(const Stretch& s, const OptimizerOptions& options) const {
  const auto& o = static_cast<const SGDOptions&>(options);
  sgd_update({.lr = o.lr(), .momentum = o.momentum(), .dampening = o.dampening(), .weight_decay = o.weight_decay(),
              .nesterov = o.nesterov(), .first = s.step == 1},
             s.weight, s.grad, s.states.empty() ? at::Tensor() : s.states[0], s.copy);
}

void SGD::save(torch::serialize::OutputArchive& archive) const { torch::optim::serialize<NamedState, SGDOptions>(archive, *this); }
void SGD::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<NamedState, SGDOptions>(archive, *this);
  loaded();
}

}  // namespace weft::optim
