#include "weft/models/stages.h"

#include <ATen/ATen.h>

#include "weft/cost/block.h"
#include "weft/layout/stages.h"

namespace weft::models {

std::vector<StagePart> stage_parts(const model::ModelSpec& spec, int64_t stages, double sequence) {
  const auto hidden = static_cast<double>(spec.hidden);
  std::vector<double> costs{hidden};  // a look-up: next to nothing
  for (const model::BlockSpec& block : spec.blocks)
    costs.push_back(cost::block_linear_flops(block, hidden) + cost::block_attention_flops(block, sequence, /*causal=*/true));
  costs.push_back(2 * hidden * static_cast<double>(spec.vocab));
  const std::vector<int64_t> begins = layout::cut_by_cost(costs, stages);
  std::vector<StagePart> parts;
  for (size_t s = 0; s + 1 < begins.size(); ++s) {
    parts.push_back({.first = std::max<int64_t>(begins[s] - 1, 0),
                     .end = std::min(begins[s + 1] - 1, spec.layers()),
                     .embedding = s == 0,
                     .head = s + 2 == begins.size()});
  }
  return parts;
}

std::vector<StagePart> parts_of_rank(const std::vector<StagePart>& all, const std::vector<int>& owner, int rank) {
  std::vector<StagePart> parts;
  for (size_t s = 0; s < all.size(); ++s) {
    if (owner[s] == rank) parts.push_back(all[s]);
  }
  return parts;
}

SideInputs side_inputs(const at::Tensor& tokens, const nn::TokenPlace& place) {
  return {{kTokens, tokens}, {kPlace, at::tensor({static_cast<int64_t>(place.step), static_cast<int64_t>(place.first_sample)}, at::kLong)}};
}

Stages stages_of(Transformer& model, const std::vector<StagePart>& all, const std::vector<int>& owner, int rank) {
  Stages stages{.local = {}, .owner = owner, .tied = {}, .module = model.ptr()};
  const int count = static_cast<int>(all.size());
  for (int s = 0; s < count; ++s) {
    const StagePart part = all[static_cast<size_t>(s)];
    if (owner[static_cast<size_t>(s)] != rank) continue;
    const auto forward = [impl = model.ptr(), part](std::vector<at::Tensor> inputs, const SideInputs& side) -> std::vector<at::Tensor> {
      const at::Tensor& place = side.at(kPlace);
      const nn::TokenPlace where{.step = place[0].item<int64_t>(), .first_sample = place[1].item<int64_t>()};
      return {impl->forward_part(part, inputs.at(0), side.at(kTokens), where)};
    };
    stages.local.emplace(s, Stage{.name = "", .module = model->modules_of(part), .forward = forward});
  }
  if (model->spec().tied_head && count > 1) stages.tied.push_back({{{0, "tok.weight"}, {count - 1, "tok.weight"}}});
  return stages;
}

}  // namespace weft::models
