#include "weft/parallel/pipeline/plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>

#include "weft/core/error.h"
#include "weft/nn/layers.h"
#include "weft/nn/vocab_parallel.h"
#include "weft/schedule/passes.h"
#include "weft/schedule/text.h"
#include "weft/schedule/validate.h"

namespace weft::parallel {
namespace {

using schedule::Action;
using schedule::Kind;
using schedule::Schedule;

bool has(const Schedule& schedule, std::initializer_list<Kind> kinds) {
  for (const auto& list : schedule.ranks) {
    if (std::ranges::any_of(list, [&](const Action& a) { return std::ranges::find(kinds, a.kind) != kinds.end(); })) return true;
  }
  return false;
}

}  // namespace

PipelinePlan::PipelinePlan(schedule::Maker make, const Stages& stages, int ranks, int whole_stages)
    : make_(std::move(make)), owner_(stages.owner), ranks_(ranks), whole_stages_(whole_stages) {
  if (!make_) throw ConfigError("a pipeline needs a schedule, for instance weft::schedule::one_f_one_b()");
  chunks_ = static_cast<int>(stages.owner.size()) / ranks;
  if (stages.owner.empty() || static_cast<int>(stages.owner.size()) % ranks != 0) {
    throw ConfigError(fmt::format("{} stages do not divide over {} pipeline ranks; cut the model into a multiple of {}", stages.owner.size(), ranks, ranks));
  }
  if (whole_stages_ <= 0) whole_stages_ = chunks_;
  // Enough micro-batches for every phase of a pattern to appear.
  splits_ = has(training(2 * ranks), {Kind::input_grad, Kind::weight_grad}) || has(training(1), {Kind::input_grad});
}

Schedule PipelinePlan::training(int micro_batches) const {
  Schedule schedule = make_({ranks_, micro_batches, chunks_});
  if (schedule.rank_count() != ranks_ || schedule.owner != owner_) {
    throw ConfigError(fmt::format("schedule {} places stages on ranks {}, and the model was cut for {}. Cut it with the placement that the schedule has "
                                  "(zb-v and dualpipe-v: two chunks, Placement::v)", schedule.name, fmt::join(schedule.owner, ", "), fmt::join(owner_, ", ")));
  }
  return schedule;
}

const PipelinePlan::Made& PipelinePlan::of(int micro_batches, bool forward_only) {
  const auto known = made_.find({micro_batches, forward_only});
  if (known != made_.end()) return known->second;
  if (micro_batches < 1) throw ConfigError(fmt::format("{} micro-batches; a step has at least 1", micro_batches));
  Schedule schedule = training(micro_batches);
  if (schedule.micro_batches != micro_batches) {
    throw ConfigError(fmt::format("schedule {} is for {} micro-batches, and the step has {}", schedule.name, schedule.micro_batches, micro_batches));
  }
  schedule::require_valid(schedule);
  if (forward_only) {
    for (auto& list : schedule.ranks) std::erase_if(list, [](const Action& a) { return a.kind != Kind::forward; });
    for (auto& list : schedule.ranks) std::ranges::for_each(list, [](Action& a) { a.with_next = false; });
    schedule.forward_only = true;
  }
  if (!has(schedule, {Kind::send_activation, Kind::send_grad})) schedule::add_communication(schedule);
  if (!has(schedule, {Kind::reduce})) schedule::add_sharding(schedule, {.whole_stages = whole_stages_});
  schedule::require_valid(schedule);
  const auto fingerprint = static_cast<int64_t>(std::hash<std::string>()(schedule::to_text(schedule)) >> 1);
  return made_.emplace(std::pair(micro_batches, forward_only), Made{std::move(schedule), fingerprint}).first->second;
}

void require_split_backward(const Stages& stages) {
  for (const auto& [number, stage] : stages.local) {
    if (!stage.module) continue;
    for (const auto& item : stage.module->named_modules()) {
      const torch::nn::Module* module = item.value().get();
      if (dynamic_cast<const nn::SplitsBackward*>(module) != nullptr || dynamic_cast<const nn::EmbeddingImpl*>(module) != nullptr ||
          dynamic_cast<const nn::VocabEmbeddingImpl*>(module) != nullptr || dynamic_cast<const torch::nn::EmbeddingImpl*>(module) != nullptr) {
        continue;
      }
      for (const auto& parameter : module->named_parameters(/*recurse=*/false)) {
        if (!parameter.value().requires_grad() || parameter.value().dim() < 2) continue;
        throw ConfigError(fmt::format("stage {}: module '{}' ({}) has the weight '{}', and its backward cannot be split as this schedule wants. Use "
                                      "weft::Split<torch::nn::Linear>, a schedule without I and W (1f1b, interleaved), or PipelineOptions::unsplit = "
                                      "Unsplit::with_input", number, item.key(), module->name(), parameter.key()));
      }
    }
  }
}

}  // namespace weft::parallel
