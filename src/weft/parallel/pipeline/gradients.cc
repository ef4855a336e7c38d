#include "weft/parallel/pipeline/gradients.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "weft/core/error.h"

namespace weft::parallel {

StageGradients::StageGradients(const Stages& stages, const Comm& comm) : stages_(&stages) {
  for (const TiedParameter& tied : stages.tied) {
    std::set<int> holders;
    Tie tie;
    for (const auto& [stage, name] : tied.of_stage) {
      const int rank = stages.owner.at(static_cast<size_t>(stage));
      holders.insert(rank);
      if (rank != comm.rank()) continue;
      const at::Tensor* found = stages.module ? stages.module->named_parameters().find(name) : nullptr;
      if (found == nullptr) throw ConfigError(fmt::format("tied parameter '{}' of stage {} is not there", name, stage));
      if (tie.parameter.defined() && !tie.parameter.is_same(*found)) {
        throw ConfigError(fmt::format("'{}' is tied to a parameter of another stage on the same rank; make them one tensor", name));
      }
      tie.parameter = *found;
    }
    if (holders.size() < 2) continue;
    tie.ranks = comm.split([&](int rank) { return SplitPlace{.color = holders.contains(rank) ? 0 : -1, .key = rank}; }, comm.name() + ".tied");
    ties_.push_back(std::move(tie));
  }
}

void StageGradients::reduce_with(DataParallel& dp) { dp_ = &dp; }

/// A sum that is reduced again would be multiplied by the number of ranks.
void StageGradients::begin_step() {
  waiting_ = stages_->local.size();
  if (dp_ != nullptr) {
    const bool whole = dp_->options().sharding == Sharding::none && dp_->comm().size() > 1;
    const bool holds = std::ranges::any_of(dp_->parameters(), [](const NamedTensor& p) { return p.tensor.grad().defined(); });
    if (reduced_ && whole && holds && dp_->options().grad_scale == GradScale::sum) {
      throw ConfigError("the gradients of the last step are reduced already, and GradScale::sum cannot add to them. Call zero_grad() before this "
                        "step, or Pipeline::sync(false) for all steps of an accumulation but the last");
    }
    dp_->sync(false);
  }
  for (Tie& tie : ties_) {
    tie.earlier.reset();
    if (!reduced_ || !tie.parameter.defined() || !tie.parameter.grad().defined()) continue;
    tie.earlier = tie.parameter.grad().clone();
    tie.parameter.mutable_grad().reset();
  }
  reduced_ = false;
}

std::string StageGradients::names_of(int stage) const {
  std::string names;
  const Stage& mine = stages_->local.at(stage);
  if (!mine.module) return names;
  std::set<const void*> wanted;
  for (const at::Tensor& p : mine.module->parameters()) wanted.insert(p.unsafeGetTensorImpl());
  for (const auto& p : stages_->module->named_parameters()) {
    if (wanted.contains(p.value().unsafeGetTensorImpl())) names += (names.empty() ? "" : "|") + p.key();
  }
  return names;
}

void StageGradients::carry_out(schedule::Kind kind, int stage, bool forward_only) {
  using schedule::Kind;
  if (kind == Kind::unshard && dp_ != nullptr && dp_->options().sharding == Sharding::parameters && dp_->comm().size() > 1) {
    if (const std::string names = names_of(stage); !names.empty()) gathered_.emplace(stage, dp_->unsharded(names));
  }
  if (kind == Kind::reshard) gathered_.erase(stage);
  if (kind != Kind::reduce || forward_only || --waiting_ > 0) return;
  if (dp_ != nullptr) dp_->sync(sync_);
  if (!sync_) return;
  sum_tied();
  if (dp_ != nullptr) dp_->join_without_batch();  // brings nothing of its own: what the micro-batches left is reduced
  reduced_ = true;
}

void StageGradients::sum_tied() {
  const at::NoGradGuard no_grad;
  for (Tie& tie : ties_) {
    if (!tie.parameter.defined()) continue;
    at::Tensor& grad = tie.parameter.mutable_grad();
    if (!grad.defined()) grad = at::zeros_like(tie.parameter, tie.parameter.options().requires_grad(false));
    if (!grad.is_contiguous()) grad = grad.contiguous();
    tie.ranks.all_reduce(grad).released();
    if (tie.earlier.defined()) grad.add_(tie.earlier);
    tie.earlier.reset();
  }
}

}  // namespace weft::parallel
