#include "weft/optim/adam8bit.h"

#include <torch/optim/serialize.h>

#include "weft/core/error.h"
#include "weft/optim/optim.h"
#include "weft/optim/tensor_parts.h"
#include "weft/parallel/shard_owner.h"

namespace weft::optim {
namespace {

bool quantised(const at::Tensor& parameter) {
  const ShardInfo* shard = shard_info(parameter);
  return (shard != nullptr ? shard->numel() : parameter.numel()) >= kLeastQuantised;
}

void check_cuts(const ShardInfo& shard) {
  for (const int64_t cut : shard.cuts) {
    if (cut % kQuantBlock == 0 || cut == shard.numel()) continue;
    throw ConfigError("parameter '" + shard.name + "' is cut at element " + std::to_string(cut) + ", inside of a block of " +
                      std::to_string(kQuantBlock) + " elements that share a scale. Give DataParallelOptions::granules = {{\"*\", " +
                      std::to_string(kQuantBlock) + "}}");
  }
}

}  // namespace

Adam8bit::Adam8bit(const std::vector<OptimizerParamGroup>& groups, AdamWOptions defaults)
    : ElementwiseOptimizer(groups, std::make_unique<AdamWOptions>(defaults)) {
  refuse_tensor_parts(param_groups_, "Adam8bit", "has a scale per block of neighbouring elements");
  for (const auto& group : param_groups_) {
    if (static_cast<const AdamWOptions&>(group.options()).amsgrad()) {
      throw ConfigError("amsgrad is on, which weft::optim::Adam8bit does not keep. Use torch::optim::AdamW");
    }
    for (const at::Tensor& p : group.params()) {
      if (const ShardInfo* shard = shard_info(p); shard != nullptr && quantised(p)) check_cuts(*shard);
    }
  }
}

std::vector<StateSpec> Adam8bit::own_states(const at::Tensor& parameter, const OptimizerOptions&) const {
  const at::ScalarType wide = wide_dtype(parameter.scalar_type());
  if (!quantised(parameter)) return {{.name = "exp_avg", .dtype = wide}, {.name = "exp_avg_sq", .dtype = wide}};
  return {{.name = "exp_avg_codes", .dtype = at::kByte},
          {.name = "exp_avg_scales", .dtype = wide, .per = kQuantBlock},
          {.name = "exp_avg_sq_codes", .dtype = at::kByte},
          {.name = "exp_avg_sq_scales", .dtype = wide, .per = kQuantBlock}};
}

int64_t Adam8bit::granule(const at::Tensor& parameter) const { return quantised(parameter) ? kQuantBlock : 1; }

void Adam8bit::update(const Stretch& s, const OptimizerOptions& options) const {
  const AdamWStep step = adamw_step(static_cast<const AdamWOptions&>(options), s.step);
  if (s.states.size() == 2) return adamw_update(step, s.weight, s.grad, s.states[0], s.states[1], s.copy);
  adam8bit_update(step, s.weight, s.grad, {s.states[0], s.states[1]}, {s.states[2], s.states[3]}, s.copy);
}

void Adam8bit::save(torch::serialize::OutputArchive& archive) const { torch::optim::serialize<NamedState, AdamWOptions>(archive, *this); }
void Adam8bit::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<NamedState, AdamWOptions>(archive, *this);
  loaded();
}

}  // namespace weft::optim
