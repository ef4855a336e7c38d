#include "weft/parallel/pipeline/cut.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <numeric>

#include "weft/core/error.h"
#include "weft/layout/stages.h"

namespace weft {
namespace {

/// First module of each stage, and their number.
std::vector<int64_t> begins_of(const torch::nn::Sequential& sequential, int64_t stages, const std::vector<int64_t>& modules) {
  const auto count = static_cast<int64_t>(sequential->size());
  if (modules.empty()) {
    std::vector<double> costs;
    for (const auto& any : *sequential) {
      double cost = 1;
      for (const at::Tensor& p : any.ptr()->parameters()) cost += static_cast<double>(p.numel());
      costs.push_back(cost);
    }
    return layout::cut_by_cost(costs, stages);
  }
  const int64_t sum = std::accumulate(modules.begin(), modules.end(), int64_t{0});
  if (std::ssize(modules) != stages || sum != count || std::ranges::any_of(modules, [](int64_t n) { return n < 1; })) {
    throw ConfigError(fmt::format("CutOptions::modules = {} for {} stages of a Sequential with {} modules; one number per stage, each at least 1, with that sum",
                                  fmt::join(modules, ", "), stages, count));
  }
  std::vector<int64_t> begins{0};
  for (const int64_t n : modules) begins.push_back(begins.back() + n);
  return begins;
}

}  // namespace

std::vector<int> stage_owners(int ranks, int chunks, Placement placement) {
  if (placement == Placement::v && chunks > 2) throw ConfigError(fmt::format("{} chunks per rank in a V, which has 2; use Placement::loop", chunks));
  std::vector<int> owner;
  for (int stage = 0; stage < ranks * chunks; ++stage) {
    owner.push_back(placement == Placement::v && stage >= ranks ? 2 * ranks - 1 - stage : stage % ranks);
  }
  return owner;
}

Stages cut(const torch::nn::Sequential& sequential, const Comm& pp, const CutOptions& options) {
  if (options.chunks < 1) throw ConfigError(fmt::format("CutOptions::chunks = {}; a rank has one stage at least", options.chunks));
  Stages stages;
  stages.owner = stage_owners(pp.size(), options.chunks, options.placement);
  const std::vector<int64_t> begins = begins_of(sequential, std::ssize(stages.owner), options.modules);
  stages.module = std::make_shared<torch::nn::Module>("Stages");
  const std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> children = [&] {
    std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> list;
    for (const auto& child : sequential->named_children()) list.emplace_back(child.key(), child.value());
    return list;
  }();
  std::map<const void*, TiedParameter> uses;
  std::map<const void*, at::Tensor> tensors;
  for (size_t s = 0; s < stages.owner.size(); ++s) {
    const int stage = static_cast<int>(s);
    auto part = std::make_shared<torch::nn::Module>("Stage");
    std::vector<torch::nn::AnyModule> list;
    for (auto k = static_cast<size_t>(begins[s]); k < static_cast<size_t>(begins[s + 1]); ++k) {
      const auto& [name, child] = children[k];
      for (const auto& p : child->named_parameters()) {
        const void* key = p.value().unsafeGetTensorImpl();
        uses[key].of_stage.emplace(stage, name + "." + p.key());
        tensors.emplace(key, p.value());
      }
      if (stages.owner[s] != pp.rank()) continue;
      part->register_module(name, child);
      stages.module->register_module(name, child);
      list.push_back(*(sequential->begin() + static_cast<int64_t>(k)));
    }
    if (stages.owner[s] == pp.rank()) stages.local.emplace(stage, stage_of(std::move(list), part));
  }
  // In the order of first use, which is equal on all ranks; addresses are not.
  std::map<std::pair<int, std::string>, const void*> ordered;
  for (const auto& [key, tied] : uses) {
    if (tied.of_stage.size() > 1) ordered.emplace(*tied.of_stage.begin(), key);
  }
  for (const auto& [first, key] : ordered) {
    stages.tied.push_back(uses[key]);
    const at::Tensor& value = tensors[key];
    if (value.is_meta() || pp.size() == 1) continue;
    const at::NoGradGuard no_grad;
    at::Tensor copy = value.detach().contiguous();
    pp.broadcast(copy, stages.owner[static_cast<size_t>(first.first)]).released();
    value.detach().copy_(copy);
  }
  return stages;
}

}  // namespace weft
