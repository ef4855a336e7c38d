#include "weft/optim/adam8bit.h"

#include <fmt/format.h>
#include <torch/optim/serialize.h>

#include "weft/core/error.h"
#include "weft/optim/optim.h"
#include "weft/optim/tensor_parts.h"
#include "weft/parallel/shard_owner.h"

namespace weft::optim {
namespace {

bool quantised(const at::Tensor& parameter) { return tensor_part(parameter).numel() >= kLeastQuantised; }

void check_cuts(const ShardInfo& shard) {
  for (const int64_t cut : shard.cuts) {
    if (cut % kQuantBlock == 0 || cut == shard.numel()) continue;
    throw ConfigError("parameter '" + shard.name + "' is cut at element " + std::to_string(cut) + ", inside of a block of " +
                      std::to_string(kQuantBlock) + " elements that share a scale. Give DataParallelOptions::granules = {{\"*\", " +
                      std::to_string(kQuantBlock) + "}}");
  }
}

/// Empty, or why this tensor-parallel rank's part cuts a block of the whole parameter.
std::string cut_block(const at::Tensor& parameter) {
  const TensorPart part = tensor_part(parameter);
  if (!part.cut()) return {};
  const nn::TensorPlacement& p = *part.placement;
  const ShardInfo* shard = shard_info(parameter);
  const int64_t size = shard != nullptr ? shard->shape[static_cast<size_t>(p.dim)] : parameter.size(p.dim);
  const bool rows = p.dim == 0 && p.shape.size() > 1;  // a part is one stretch
  const int64_t unit = rows ? part.numel() / p.shape[0] : 1;
  const int64_t begin = p.begin * unit, end = (p.begin + size) * unit;
  const bool ends = end == (rows ? part.numel() : part.columns);
  if (begin % kQuantBlock == 0 && (ends || end % kQuantBlock == 0) && (rows || p.shape.size() == 1 || part.columns % kQuantBlock == 0)) return {};
  return fmt::format("parameter {}of shape {} is cut over {} tensor-parallel ranks inside of a block of {} neighbouring elements that share a scale: numbers would "
                     "depend on the layout. Use sizes of which each rank gets multiples of {} elements in a row, an optimizer that treats elements alike (AdamW, Lion), "
                     "or no tensor parallelism", shard != nullptr ? "'" + shard->name + "' " : "", c10::str(at::IntArrayRef(p.shape)), p.comm.size(), kQuantBlock, kQuantBlock);
}

/// Ranks whose own parts are whole blocks must hear of the others'.
void check_tensor_parts(const std::vector<OptimizerParamGroup>& groups) {
  std::string mine;
  std::vector<TensorPart> parts;
  for (const auto& group : groups) {
    for (const at::Tensor& p : group.params()) {
      parts.push_back(tensor_part(p));
      if (mine.empty() && quantised(p)) mine = cut_block(p);
    }
  }
  const Comm tp = tensor_ranks(parts, "Adam8bit");
  if (tp.size() == 1) return;
  for (const std::string& text : tp.all_gather_text(mine)) {
    if (!text.empty()) throw ConfigError(text);
  }
}

}  // namespace

Adam8bit::Adam8bit(const std::vector<OptimizerParamGroup>& groups, AdamWOptions defaults)
    : ElementwiseOptimizer(groups, std::make_unique<AdamWOptions>(defaults)) {
  for (const auto& group : param_groups_) {
    if (static_cast<const AdamWOptions&>(group.options()).amsgrad()) {
      throw ConfigError("amsgrad is on, which weft::optim::Adam8bit does not keep. Use torch::optim::AdamW");
    }
    for (const at::Tensor& p : group.params()) {
      if (const ShardInfo* shard = shard_info(p); shard != nullptr && quantised(p)) check_cuts(*shard);
    }
  }
  check_tensor_parts(param_groups_);
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
