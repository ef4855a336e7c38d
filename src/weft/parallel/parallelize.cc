#include "weft/parallel/parallelize.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "weft/core/error.h"
#include "weft/core/pattern.h"
#include "weft/nn/placement.h"
#include "weft/nn/start_values.h"
#include "weft/parallel/buffers.h"

namespace weft {
namespace {

/// All ranks must cut the same module.
void check_same(const torch::nn::Module& module, const Comm& tp) {
  std::string mine;
  for (const auto& p : module.named_parameters()) {
    const auto values = nn::start_values(p.value());
    mine += fmt::format("{} [{}] {} {}\n", p.key(), fmt::join(p.value().sizes(), ", "), c10::toString(p.value().scalar_type()),
                        values ? values->describe() : "");
  }
  const std::vector<std::string> all = tp.all_gather_text(mine);
  for (int rank = 1; rank < tp.size(); ++rank) {
    if (all[static_cast<size_t>(rank)] == all[0]) continue;
    throw ConfigError(fmt::format("parallelize: rank {} built another module than rank {} (names, shapes, dtypes or deferred start values differ). "
                                  "Build the same module with the same seed on every rank", tp.world_rank(rank), tp.world_rank(0)));
  }
}

/// Each rank's gradient is that of its part of the sequence.
void sum_gradients(torch::nn::Module& module, const Comm& tp) {
  for (at::Tensor& p : module.parameters()) {
    if (!p.requires_grad()) continue;
    p.register_hook([tp](const at::Tensor& gradient) {
      at::Tensor total = gradient.clone(at::MemoryFormat::Contiguous);
      tp.all_reduce(total).wait();
      return total;
    });
  }
}

void share_out(torch::nn::Module& module, const std::string& path, TensorStyle style, const nn::TensorAxis& tp) {
  if (style == TensorStyle::sequence) return sum_gradients(module, tp.comm());
  auto* split = dynamic_cast<nn::SplitBase*>(&module);
  if (split == nullptr) {
    throw ConfigError(fmt::format("parallelize: module '{}' is a {}, whose forward nobody can intercept. Declare it weft::Split<torch::nn::Linear> or "
                                  "weft::Split<torch::nn::Embedding>: same arguments, same parameter names", path, module.name()));
  }
  split->cut(style, tp, path);
}

}  // namespace

void parallelize(torch::nn::Module& module, const Comm& comm, const TensorPlan& plan, int64_t overlap) {
  if (comm.size() == 1) return;
  check_same(module, comm);
  const bool sequence = std::any_of(plan.begin(), plan.end(), [](const auto& item) { return item.second == TensorStyle::sequence; });
  const nn::TensorAxis tp(comm, sequence, overlap);
  for (const auto& [pattern, style] : plan) {
    bool found = false;
    for (const auto& item : module.named_modules("", /*include_self=*/false)) {
      if (!matches(pattern, item.key())) continue;
      found = true;
      share_out(*item.value(), item.key(), style, tp);
    }
    if (found) continue;
    std::vector<std::string> names;
    for (const auto& item : module.named_modules("", /*include_self=*/false)) names.push_back(item.key());
    throw ConfigError(fmt::format("parallelize: no module is named '{}'; there are: {}", pattern, fmt::join(names, ", ")));
  }
  for (const auto& p : module.named_parameters()) {
    if (nn::placement_of(p.value())) continue;
    if (!p.value().is_meta()) parallel::broadcast_tensor(p.value(), comm);
    if (!p.value().is_floating_point() && !p.value().is_complex()) continue;  // takes part in no gradient
    nn::set_placement(p.value(), {.comm = comm, .shape = p.value().sizes().vec(), .dim = -1, .copies = comm.size()});
  }
  for (const auto& b : module.named_buffers()) {
    if (!b.value().is_meta()) parallel::broadcast_tensor(b.value(), comm);
  }
}

}  // namespace weft
