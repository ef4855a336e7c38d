#include "weft/optim/optim.h"

#include <torch/serialize/archive.h>

#include "weft/core/error.h"
#include "weft/core/philox.h"
#include "weft/memory/account.h"
#include "weft/optim/kernels.h"
#include "weft/parallel/shard_owner.h"

namespace weft::optim {
namespace {

/// The loss of an optional closure, evaluated with gradients on (as torch's optimizers do).
at::Tensor evaluate(const torch::optim::Optimizer::LossClosure& closure) {
  if (closure == nullptr) return {};
  const at::AutoGradMode enable_grad(true);
  return closure();
}

std::string master_key(size_t index) { return "master/" + std::to_string(index); }

void require_dense(const at::Tensor& parameter, const at::Tensor& grad) {
  if (parameter.is_contiguous() && grad.layout() == at::kStrided && !parameter.is_complex()) return;
  throw ConfigError("a parameter of shape " + c10::str(parameter.sizes()) + " is not contiguous, sparse or complex; weft's "
                    "optimizers update dense real parameters. Use a torch::optim optimizer for it");
}

/// Sharded parameters have to be gathered after the update, before anybody reads them.
void notify(const std::vector<OptimizerParamGroup>& groups) {
  for (const auto& group : groups) {
    for (const at::Tensor& p : group.params()) parallel::notify_updated(p);
  }
}

bool is_16_bit(const at::Tensor& t) { return t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf; }

}  // namespace

at::Tensor MasterWeights::of(const at::Tensor& parameter) {
  if (!is_16_bit(parameter)) return parameter;
  at::Tensor& master = masters_[parameter.unsafeGetTensorImpl()];
  if (!master.defined()) master = parameter.detach().to(at::kFloat);
  return master;
}

void MasterWeights::save(torch::serialize::OutputArchive& archive, const std::vector<OptimizerParamGroup>& groups) const {
  size_t index = 0;
  for (const auto& group : groups) {
    for (const at::Tensor& p : group.params()) {
      const auto found = masters_.find(p.unsafeGetTensorImpl());
      if (found != masters_.end()) archive.write(master_key(index), found->second, /*is_buffer=*/true);
      ++index;
    }
  }
}

void MasterWeights::load(torch::serialize::InputArchive& archive, const std::vector<OptimizerParamGroup>& groups) {
  size_t index = 0;
  for (const auto& group : groups) {
    for (const at::Tensor& p : group.params()) {
      at::Tensor master;
      if (archive.try_read(master_key(index++), master, /*is_buffer=*/true)) masters_[p.unsafeGetTensorImpl()] = master;
    }
  }
}

AdamW::AdamW(const std::vector<OptimizerParamGroup>& groups, AdamWOptions defaults)
    : torch::optim::AdamW(groups, std::move(defaults)) {
  for (const auto& group : param_groups_) {
    if (static_cast<const AdamWOptions&>(group.options()).amsgrad()) {
      throw ConfigError("amsgrad is on, which weft::optim::AdamW does not keep. Use torch::optim::AdamW");
    }
  }
}

at::Tensor AdamW::step(LossClosure closure) {
  const at::Tensor loss = evaluate(closure);
  const at::NoGradGuard no_grad;
  const memory::Scope scope(memory::Category::optimizer);
  for (auto& group : param_groups_) {
    const auto& options = static_cast<const AdamWOptions&>(group.options());
    for (at::Tensor& parameter : group.params()) {
      if (parameter.grad().defined()) update(parameter, options);
    }
  }
  notify(param_groups_);
  return loss;
}

void AdamW::update(at::Tensor& parameter, const AdamWOptions& options) {
  const at::Tensor& grad = parameter.grad();
  require_dense(parameter, grad);
  const auto rounding = roundings_.find(parameter.unsafeGetTensorImpl());
  const bool rounded = rounding != roundings_.end();
  const at::Tensor weight = rounded ? parameter.detach() : masters_.of(parameter);
  auto& slot = state_[parameter.unsafeGetTensorImpl()];
  if (!slot) {
    const auto dtype = rounded ? at::kFloat : weight.scalar_type();
    auto fresh = std::make_unique<torch::optim::AdamWParamState>();
    fresh->exp_avg(at::zeros_like(weight, weight.options().dtype(dtype)));
    fresh->exp_avg_sq(at::zeros_like(weight, weight.options().dtype(dtype)));
    slot = std::move(fresh);
  }
  auto& state = static_cast<torch::optim::AdamWParamState&>(*slot);
  state.step(state.step() + 1);
  const auto [beta1, beta2] = options.betas();
  const AdamWStep step{.lr = options.lr(),
                       .beta1 = beta1,
                       .beta2 = beta2,
                       .eps = options.eps(),
                       .weight_decay = options.weight_decay(),
                       .step = state.step()};
  if (rounded) return adamw_update_rounded(step, weight, grad.contiguous(), state.exp_avg(), state.exp_avg_sq(), rounding->second);
  adamw_update(step, weight, grad.contiguous(), state.exp_avg(), state.exp_avg_sq(),
               weight.is_same(parameter) ? at::Tensor() : parameter.detach());
}

void AdamW::round_stochastically(uint64_t seed, const std::vector<NamedTensor>& parameters, const std::vector<int64_t>& begins) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const NamedTensor& p = parameters[i];
    if (p.tensor.scalar_type() != at::kBFloat16) {
      throw ConfigError("parameter '" + p.name + "' is " + c10::toString(p.tensor.scalar_type()) +
                        "; stochastic rounding is for bf16. Leave it out");
    }
    roundings_[p.tensor.unsafeGetTensorImpl()] = {
        .seed = seed, .stream = philox::stream_of("round/" + p.name), .first = i < begins.size() ? begins[i] : 0};
  }
}

void AdamW::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::AdamW::save(archive);
  masters_.save(archive, param_groups_);
}

void AdamW::load(torch::serialize::InputArchive& archive) {
  torch::optim::AdamW::load(archive);
  masters_.load(archive, param_groups_);
}

SGD::SGD(const std::vector<OptimizerParamGroup>& groups, SGDOptions defaults)
    : torch::optim::SGD(groups, std::move(defaults)) {}

at::Tensor SGD::step(LossClosure closure) {
  const at::Tensor loss = evaluate(closure);
  const at::NoGradGuard no_grad;
  const memory::Scope scope(memory::Category::optimizer);
  for (auto& group : param_groups_) {
    const auto& options = static_cast<const SGDOptions&>(group.options());
    for (at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      require_dense(parameter, parameter.grad());
      at::Tensor weight = masters_.of(parameter);
      at::Tensor update = parameter.grad().to(weight.scalar_type());
      if (options.weight_decay() != 0) update = update.add(weight.detach(), options.weight_decay());
      if (options.momentum() != 0) {
        auto& slot = state_[parameter.unsafeGetTensorImpl()];
        if (!slot) {
          auto fresh = std::make_unique<torch::optim::SGDParamState>();
          fresh->momentum_buffer(update.clone());
          slot = std::move(fresh);
        } else {
          static_cast<torch::optim::SGDParamState&>(*slot).momentum_buffer().mul_(options.momentum()).add_(
              update, 1 - options.dampening());
        }
        const at::Tensor& buffer = static_cast<torch::optim::SGDParamState&>(*slot).momentum_buffer();
        update = options.nesterov() ? update.add(buffer, options.momentum()) : buffer;
      }
      weight.add_(update, -options.lr());
      if (!weight.is_same(parameter)) parameter.detach().copy_(weight);
    }
  }
  notify(param_groups_);
  return loss;
}

void SGD::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::SGD::save(archive);
  masters_.save(archive, param_groups_);
}

void SGD::load(torch::serialize::InputArchive& archive) {
  torch::optim::SGD::load(archive);
  masters_.load(archive, param_groups_);
}

}  // namespace weft::optim
